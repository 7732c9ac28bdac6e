# Fails the build when an object compiled for a newer instruction set defines any symbol but its entry point.
#
# The linker keeps one copy of a weak (inline or template) function for the whole module. If that were the copy from such
# an object, baseline code would run instructions that the CPU may lack.
# Run with -DNM=... -DENTRY=... -DOBJECTS=a.o,b.o

string(REPLACE "," ";" OBJECTS "${OBJECTS}")
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND "${NM}" -g --defined-only "${object}" OUTPUT_VARIABLE listing COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" lines "${listing}")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^[0-9a-fA-F]+ +[A-Za-z] +" "" symbol "${line}")
    if(NOT symbol STREQUAL line AND NOT symbol MATCHES "^_?${ENTRY}_(dense|decode|sparse|pool)$")
      message(FATAL_ERROR "${object} leaks ${symbol}: make it local (anonymous namespace) or force it inline")
    endif()
  endforeach()
endforeach()
