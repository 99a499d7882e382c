// Names the host as far as passing file descriptors goes: boot, user and network namespace.
#pragma once

#include <string>

namespace hsdp::comm {

[[nodiscard]] std::string host_identity();

}  // namespace hsdp::comm
