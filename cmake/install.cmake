# The installed package: find_package(hsdp) gives hsdp::hsdp, static or shared as it was built.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
include(${CMAKE_CURRENT_LIST_DIR}/public_headers.cmake)

set(hsdp_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/hsdp)
get_target_property(hsdp_library_type hsdp TYPE)
file(RELATIVE_PATH hsdp_lib_from_bin /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})

install(TARGETS hsdp EXPORT hsdpTargets)
foreach(tool IN ITEMS hsdp_check hsdp_plan hsdp_run)
  if(TARGET ${tool})
    set_target_properties(${tool} PROPERTIES INSTALL_RPATH $ORIGIN/${hsdp_lib_from_bin})
    install(TARGETS ${tool})
  endif()
endforeach()
foreach(header IN LISTS HSDP_PUBLIC_HEADERS)
  get_filename_component(directory ${header} DIRECTORY)
  install(FILES ${PROJECT_SOURCE_DIR}/${header}
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${directory})
endforeach()

install(EXPORT hsdpTargets NAMESPACE hsdp:: DESTINATION ${hsdp_package_dir})
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/hsdpConfig.cmake.in ${PROJECT_BINARY_DIR}/hsdpConfig.cmake
  INSTALL_DESTINATION ${hsdp_package_dir})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/hsdpConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/hsdpConfig.cmake ${PROJECT_BINARY_DIR}/hsdpConfigVersion.cmake
        DESTINATION ${hsdp_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
