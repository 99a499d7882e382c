// Communicators whose callers see their memory on another device than the engine does. That is
// correct as long as a GPU's memory is the host's.
#pragma once

#include "hsdp/comm/communicator.h"

namespace hsdp::stand_in {

// The host's group with memory on `device`: its collectives are enqueued on the streams they are
// given. The calls are collective as on `host`, on which no collectives may run beside it.
[[nodiscard]] Communicator on_device(const Communicator& host, Device device);

// NCCL's group on `device`, with host memory.
[[nodiscard]] Communicator with_host_views(const Communicator& nccl, Device device);

}  // namespace hsdp::stand_in
