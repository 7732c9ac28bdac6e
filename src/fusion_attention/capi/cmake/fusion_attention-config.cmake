# find_package(fusion_attention): the C API of the Python package, under CANN's names.
#
# Targets: fusion_attention::fusion_attention (all), ::ascendcl, ::nnopbase, ::opapi.
# Variables, for builds without targets: fusion_attention_INCLUDE_DIRS, fusion_attention_LIBRARIES,
# fusion_attention_LIBRARY_DIRS, fusion_attention_PREFIX (what CANN's own builds call ASCEND_PATH).
get_filename_component(fusion_attention_PREFIX "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(fusion_attention_INCLUDE_DIRS "${fusion_attention_PREFIX}/include")
set(fusion_attention_LIBRARY_DIRS "${fusion_attention_PREFIX}/lib64")
set(fusion_attention_LIBRARIES)

foreach(_fusion_name IN ITEMS ascendcl nnopbase opapi)
  set(_fusion_file "${fusion_attention_LIBRARY_DIRS}/lib${_fusion_name}.so")
  if(NOT EXISTS "${_fusion_file}")
    set(fusion_attention_FOUND FALSE)
    set(fusion_attention_NOT_FOUND_MESSAGE "${_fusion_file} is not there: installed without its C API")
    return()
  endif()
  list(INSERT fusion_attention_LIBRARIES 0 "${_fusion_file}")
  if(NOT TARGET fusion_attention::${_fusion_name})
    add_library(fusion_attention::${_fusion_name} SHARED IMPORTED)
    set_target_properties(
      fusion_attention::${_fusion_name}
      PROPERTIES IMPORTED_LOCATION "${_fusion_file}"
                 IMPORTED_NO_SONAME TRUE
                 INTERFACE_INCLUDE_DIRECTORIES "${fusion_attention_INCLUDE_DIRS}")
  endif()
endforeach()
set_target_properties(fusion_attention::nnopbase PROPERTIES INTERFACE_LINK_LIBRARIES fusion_attention::ascendcl)
set_target_properties(fusion_attention::opapi PROPERTIES INTERFACE_LINK_LIBRARIES fusion_attention::nnopbase)
if(NOT TARGET fusion_attention::fusion_attention)
  add_library(fusion_attention::fusion_attention INTERFACE IMPORTED)
  set_target_properties(fusion_attention::fusion_attention PROPERTIES INTERFACE_LINK_LIBRARIES fusion_attention::opapi)
endif()
unset(_fusion_name)
unset(_fusion_file)
