// Finds and opens the shared library of NCCL.
#pragma once

#include <string>

namespace hsdp::comm {

// A dlopen handle, never closed. UsageError that says what to install when there is none.
[[nodiscard]] void* open_nccl_file();
// Where the library that holds `symbol` lies.
[[nodiscard]] std::string file_of_symbol(void* symbol);

}  // namespace hsdp::comm
