# The languages of the project. CMake's own message for a missing compiler does not say what to install.
include(CheckLanguage)
foreach(language IN ITEMS C CXX)
  check_language(${language})
  if(NOT CMAKE_${language}_COMPILER)
    unset(CMAKE_${language}_COMPILER CACHE)  # looked for again next time
    message(FATAL_ERROR "hsdp: expected a compiler for C++20, such as g++ 12, got none; on Debian and Ubuntu "
                        "`sh cmake/install_dependencies.sh build` installs it, with all else that hsdp needs")
  endif()
  enable_language(${language})
endforeach()
