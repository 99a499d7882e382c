// Identifies the host for passing file descriptors: boot, user and network namespace.
#pragma once

#include <string>

namespace hsdp::comm {

[[nodiscard]] std::string host_identity();

}  // namespace hsdp::comm
