# Warnings for our own sources: set per directory, so that no target exports them.
# They become errors only through CMAKE_COMPILE_WARNING_AS_ERROR, which the dev preset sets.
if(PROJECT_IS_TOP_LEVEL AND CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  set(hsdp_warnings -Wall -Wextra -Wconversion -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual
                    -Wno-missing-field-initializers)  # designated initializers leave defaults out
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Both report sound uses of std::string and std::optional in some versions.
    list(APPEND hsdp_warnings -Wno-maybe-uninitialized -Wno-restrict)
  endif()
  if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND hsdp_warnings -Wno-subobject-linkage)  # each source looks included there
  endif()
  foreach(warning IN LISTS hsdp_warnings)
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:${warning}>)
  endforeach()
endif()
