// The libnccl behind the shim: the file that HSDP_NCCL_SHIM_OVER names, opened at the first call.
#pragma once

#include <string>

namespace hsdp::nccl_shim {

// Returns nullptr if the library has no such function or could not be opened, which it reports to
// stderr once.
[[nodiscard]] void* real_symbol(const char* name);

// Why the library could not be opened; empty if it was.
[[nodiscard]] const std::string& open_error();

}  // namespace hsdp::nccl_shim
