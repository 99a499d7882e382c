// Communicators whose callers see their memory on another device than the engine does, which is
// right where the memory of a GPU is the host's.
#pragma once

#include "hsdp/comm/communicator.h"

namespace hsdp::stand_in {

// The host's group with memory on `device`: its collectives, enqueued on the streams that they are
// given. Collective calls as on `host`, which must not be used for collectives beside it.
[[nodiscard]] Communicator on_device(const Communicator& host, Device device);

// NCCL's group on `device` with memory of the host.
[[nodiscard]] Communicator with_host_views(const Communicator& nccl, Device device);

}  // namespace hsdp::stand_in
