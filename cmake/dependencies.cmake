# What the library is built from. All that is missing is named at once, with the command that installs
# it: CMake's own messages stop at the first one and name files of CMake.
set(hsdp_missing "")

# hsdp_need(description package...): finds `package...` as find_package does.
macro(hsdp_need description package)
  find_package(${package} ${ARGN} QUIET)
  if(NOT ${package}_FOUND)
    list(APPEND hsdp_missing "${description}")
  endif()
endmacro()

hsdp_need("Boost 1.74 with program_options (libboost-dev, libboost-program-options-dev)"
          Boost 1.74 COMPONENTS program_options)
hsdp_need("OpenSSL (libssl-dev)" OpenSSL)
hsdp_need("HDF5 for C (libhdf5-dev)" HDF5 COMPONENTS C)
hsdp_need("Highway (libhwy-dev)" hwy)
hsdp_need("nlohmann_json (nlohmann-json3-dev)" nlohmann_json)
if(HSDP_BUILD_TESTS)
  hsdp_need("GoogleTest (libgtest-dev, libgmock-dev)" GTest)
endif()

if(hsdp_missing)
  list(JOIN hsdp_missing ", " hsdp_missing)
  message(FATAL_ERROR "hsdp: expected libraries that were not found: ${hsdp_missing}; on Debian and Ubuntu "
                      "`sh cmake/install_dependencies.sh build` installs them (in brackets: the packages), "
                      "elsewhere name their folders with -DCMAKE_PREFIX_PATH. The checks of a GPU need none of "
                      "them: docs/gpu.md")
endif()
