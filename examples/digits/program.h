// The main() of the digit programs.
#pragma once

namespace examples {

// What `run` returns; an exception that leaves it is printed, and 1 is returned.
[[nodiscard]] int run_program(int (*run)(int argc, char** argv), int argc, char** argv);

}  // namespace examples
