// The main() of the digit programs.
#pragma once

namespace examples {

// Returns what `run` returns. Prints an exception and returns 1.
[[nodiscard]] int run_program(int (*run)(int argc, char** argv), int argc, char** argv);

}  // namespace examples
