# For macOS and Windows: clang with headers and libraries of both, from the package ziglang of FUSION_PYTHON (its path).
# FUSION_TARGET: aarch64-macos.11.0 or x86_64-windows-gnu.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES FUSION_PYTHON FUSION_TARGET)
if(FUSION_TARGET MATCHES "windows")
  set(CMAKE_SYSTEM_NAME Windows)
  set(CMAKE_RC_COMPILER ${FUSION_PYTHON})  # CMake wants a program, but there are no resources
else()
  set(CMAKE_SYSTEM_NAME Darwin)
  set(CMAKE_NM "" CACHE FILEPATH "")  # this system's cannot read its objects: release/cross.py does
endif()
string(REGEX REPLACE "-.*" "" CMAKE_SYSTEM_PROCESSOR ${FUSION_TARGET})
set(CMAKE_CXX_COMPILER ${CMAKE_CURRENT_LIST_DIR}/zig.sh ${FUSION_PYTHON} -m ziglang c++ -target ${FUSION_TARGET})
set(CMAKE_CXX_ARCHIVE_CREATE "${FUSION_PYTHON} -m ziglang ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "${FUSION_PYTHON} -m ziglang ranlib <TARGET>")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
