# hsdp_add_nccl_shim(name): builds libhsdp_nccl_shim.so, which checks the rules of NCCL while a program
# runs. The caller adds the headers of NCCL and of the CUDA runtime.
#
# To use it, set HSDP_NCCL_LIBRARY to the shim, HSDP_NCCL_SHIM_OVER to the libnccl behind it, and
# HSDP_NCCL_SHIM_TRACE to the folder that nccl_trace.py reads. HSDP_NCCL_SHIM_FATAL=1 ends a process at
# its first violation.
set(hsdp_nccl_shim_folder ${CMAKE_CURRENT_LIST_DIR})
function(hsdp_add_nccl_shim name)
  set(sources communicators.cpp device_rules.cpp nccl_calls.cpp real_library.cpp trace.cpp)
  list(TRANSFORM sources PREPEND ${hsdp_nccl_shim_folder}/)
  set(exports ${hsdp_nccl_shim_folder}/exports.map)
  add_library(${name} MODULE ${sources})
  set_target_properties(${name} PROPERTIES OUTPUT_NAME hsdp_nccl_shim LINK_DEPENDS ${exports})
  target_link_options(${name} PRIVATE LINKER:--version-script,${exports})
  target_link_libraries(${name} PRIVATE ${CMAKE_DL_LIBS})
endfunction()
