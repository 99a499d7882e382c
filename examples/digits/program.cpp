#include "examples/digits/program.h"

#include <cstdio>
#include <exception>

namespace examples {

int run_program(int (*run)(int argc, char** argv), int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace examples
