# nvcc, the architectures and the flags of our kernels. Included where CUDA was asked for.
#
# CMAKE_CUDA_ARCHITECTURES (cache), else CUDAARCHS (environment): by default 80, 90 and, where the
# toolkit has it, 100; machine code for each, and for the last one also what newer GPUs compile for
# themselves.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(HSDP_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT HSDP_NVCC)
    message(FATAL_ERROR "HSDP_CUDA: expected nvcc on the PATH, in CUDA_HOME or in /usr/local/cuda, "
                        "got none; install the CUDA toolkit, or configure with -DHSDP_CUDA=OFF")
  endif()
  set(CMAKE_CUDA_COMPILER ${HSDP_NVCC})
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE hsdp_known_architectures
                  ERROR_QUIET)
  if(hsdp_known_architectures MATCHES "compute_100\n")
    set(hsdp_architectures "80-real;90-real;100")
  else()
    set(hsdp_architectures "80-real;90")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${hsdp_architectures} CACHE STRING "GPU architectures to build for")
endif()
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.25.2
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)

# hsdp_use_cuda(target): its .cu files give the bits of the host (rule 5 of docs/design.md), and it
# carries the CUDA runtime, so that it loads where there is none [Note: the runtime inside].
function(hsdp_use_cuda target)
  set(flags --fmad=false -ftz=false -prec-div=true -prec-sqrt=true --expt-relaxed-constexpr
            -Xcompiler=-ffp-contract=off)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
endfunction()
