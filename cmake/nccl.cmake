# nccl.h of the engine "nccl": from the system, or from the wheel nvidia-nccl-cu13 in the active
# virtual environment, in build/nccl (install_nccl.sh), build/venv or the system's Python. libnccl
# itself is opened at run time.
set(HSDP_NCCL AUTO CACHE STRING "The NCCL engine: ON, OFF, or AUTO: with CUDA, where nccl.h is found")
set_property(CACHE HSDP_NCCL PROPERTY STRINGS AUTO ON OFF)

set(HSDP_NCCL_FOUND OFF)
if(HSDP_NCCL AND HSDP_CUDA)
  # Where the Python on the PATH keeps it, as beside torch.
  execute_process(COMMAND python3 -c "import nvidia.nccl as n; print(list(n.__path__)[0])"
                  OUTPUT_VARIABLE python_folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  file(GLOB wheel_folders LIST_DIRECTORIES true
       $ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/nccl
       ${CMAKE_CURRENT_LIST_DIR}/../build/nccl/nvidia/nccl
       ${CMAKE_CURRENT_LIST_DIR}/../build/venv/lib/python3*/site-packages/nvidia/nccl
       /usr/local/lib/python3*/*-packages/nvidia/nccl
       /usr/lib/python3*/*-packages/nvidia/nccl)
  find_path(HSDP_NCCL_INCLUDE_DIR nccl.h HINTS ENV NCCL_HOME ENV NCCL_ROOT ${CUDAToolkit_INCLUDE_DIRS}
            ${python_folder} ${wheel_folders} PATH_SUFFIXES include)
  mark_as_advanced(HSDP_NCCL_INCLUDE_DIR)
  if(HSDP_NCCL_INCLUDE_DIR)
    set(HSDP_NCCL_FOUND ON)
    file(STRINGS ${HSDP_NCCL_INCLUDE_DIR}/nccl.h version_lines
         REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) [0-9]+")
    string(REGEX REPLACE "[^0-9;]" "" HSDP_NCCL_VERSION "${version_lines}")
    string(REPLACE ";" "." HSDP_NCCL_VERSION "${HSDP_NCCL_VERSION}")
    if(HSDP_NCCL_VERSION VERSION_LESS 2.18)
      message(FATAL_ERROR "HSDP_NCCL: expected nccl.h 2.18 or newer, got ${HSDP_NCCL_VERSION} in "
                          "${HSDP_NCCL_INCLUDE_DIR}; install a newer one, or set HSDP_NCCL=OFF")
    endif()
  endif()
endif()
if(NOT HSDP_NCCL_FOUND AND HSDP_NCCL AND NOT HSDP_NCCL STREQUAL "AUTO")
  message(FATAL_ERROR "HSDP_NCCL=ON: expected HSDP_CUDA=ON and nccl.h, got none; install "
                      "libnccl-dev, or run cmake/install_nccl.sh build/nccl, or name the "
                      "folder with -DHSDP_NCCL_INCLUDE_DIR")
endif()

function(hsdp_summarize_nccl)
  if(HSDP_NCCL_FOUND)
    hsdp_summary(NCCL "yes: nccl.h ${HSDP_NCCL_VERSION}; libnccl.so.2 is opened at run time")
  elseif(NOT HSDP_NCCL)
    hsdp_summary(NCCL "no: HSDP_NCCL is OFF")
  elseif(NOT HSDP_CUDA)
    hsdp_summary(NCCL "no: needs HSDP_CUDA")
  else()
    hsdp_summary(NCCL "no: nccl.h not found (libnccl-dev, or the wheel nvidia-nccl-cu13)")
  endif()
endfunction()
