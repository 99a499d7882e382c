# Installs the library into WORK_DIR and builds and runs the consumer project against it.
cmake_minimum_required(VERSION 3.25)

function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "package: ${what} failed (${status}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

set(compilers -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_C_COMPILER=${C_COMPILER})
set(prefix ${WORK_DIR}/prefix)
file(REMOVE_RECURSE ${prefix} ${WORK_DIR}/consumer)

if(NOT BUILD_HERE)
  set(BUILD_DIR ${WORK_DIR}/build)
  if(LAUNCHER)
    string(TOUPPER "${BUILD_TYPE}" upper_type)
    set(how -DCMAKE_BUILD_TYPE=${BUILD_TYPE} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}
            -DCMAKE_COMPILE_WARNING_AS_ERROR=${WARNINGS_ARE_ERRORS}
            "-DCMAKE_CXX_FLAGS_${upper_type}=${CXX_FLAGS}")
  else()
    set(BUILD_TYPE Debug)
    set(how -DCMAKE_BUILD_TYPE=${BUILD_TYPE})
  endif()
  set(shared OFF)
  if(LINKAGE STREQUAL shared)
    set(shared ON)
  endif()
  run("configuring the ${LINKAGE} library"
      ${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${BUILD_DIR} -G ${GENERATOR} ${compilers}
      -DBUILD_SHARED_LIBS=${shared} ${how} -DCMAKE_UNITY_BUILD=ON
      -DHSDP_BUILD_TESTS=OFF -DHSDP_BUILD_EXAMPLES=OFF)
  run("building the ${LINKAGE} library" ${CMAKE_COMMAND} --build ${BUILD_DIR} -j 2)
endif()
run("installing" ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix})

run("configuring the consumer"
    ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/consumer -B ${WORK_DIR}/consumer -G ${GENERATOR}
    ${compilers} -DCMAKE_BUILD_TYPE=${BUILD_TYPE} -DCMAKE_PREFIX_PATH=${prefix}
    -DEXPECTED_VERSION=${VERSION} -DPUBLIC_HEADERS_FILE=${SOURCE_DIR}/cmake/public_headers.cmake)
run("building the consumer" ${CMAKE_COMMAND} --build ${WORK_DIR}/consumer)
run("running the consumer" ${WORK_DIR}/consumer/consumer)
if(NOT output MATCHES "1/32")
  message(FATAL_ERROR "package: the consumer printed: ${output}")
endif()

# The installed tools must find their library without LD_LIBRARY_PATH.
foreach(tool IN ITEMS hsdp_check hsdp_plan hsdp_run)
  if(EXISTS ${prefix}/bin/${tool})
    run("running ${tool} --help" ${prefix}/bin/${tool} --help)
  endif()
endforeach()

# Installed files must not refer to the source tree or the build tree.
file(GLOB_RECURSE configs ${prefix}/*.cmake)
foreach(config IN LISTS configs)
  file(READ ${config} text)
  string(FIND "${text}" "${SOURCE_DIR}/hsdp" position)
  if(NOT position EQUAL -1)
    message(FATAL_ERROR "package: ${config} names the source tree")
  endif()
endforeach()
