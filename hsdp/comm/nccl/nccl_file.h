// Finds and opens NCCL's shared library.
#pragma once

#include <string>

namespace hsdp::comm {

// A dlopen handle, never closed. Without a library, throws a UsageError that says what to install.
[[nodiscard]] void* open_nccl_file();
// The path of the library that holds `symbol`.
[[nodiscard]] std::string file_of_symbol(void* symbol);

}  // namespace hsdp::comm
