# The MPI of the engine "mpi". Of several, choose one with -DMPI_C_COMPILER=mpicc.mpich or -DMPI_HOME.
set(HSDP_MPI AUTO CACHE STRING "The MPI engine: ON, OFF, or AUTO: where an MPI is found")
set_property(CACHE HSDP_MPI PROPERTY STRINGS AUTO ON OFF)

set(HSDP_MPI_FOUND OFF)
if(HSDP_MPI STREQUAL "AUTO")
  find_package(MPI 3.0 QUIET COMPONENTS C)
  if(MPI_C_FOUND)
    set(HSDP_MPI_FOUND ON)
  endif()
elseif(HSDP_MPI)
  find_package(MPI 3.0 COMPONENTS C)
  if(NOT MPI_C_FOUND)
    message(FATAL_ERROR "HSDP_MPI=ON: no MPI was found: install one (Debian: libopenmpi-dev or "
                        "libmpich-dev), name its compiler with -DMPI_C_COMPILER, or set "
                        "HSDP_MPI=OFF")
  endif()
  set(HSDP_MPI_FOUND ON)
endif()

if(HSDP_MPI_FOUND)
  hsdp_summary(MPI "yes: ${MPI_C_COMPILER}, MPI ${MPI_C_VERSION}")
elseif(HSDP_MPI STREQUAL "AUTO")
  hsdp_summary(MPI "no: not found")
else()
  hsdp_summary(MPI "no: HSDP_MPI=OFF")
endif()
