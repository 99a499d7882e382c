// Communicators for the memory of a GPU of the stand-in: the host engine's collectives, enqueued on
// the streams that they are given.
#pragma once

#include "hsdp/comm/communicator.h"

namespace hsdp::stand_in {

// The same group with memory on `device`. Collective calls as on `host`, which must not be used
// for collectives beside it.
[[nodiscard]] Communicator on_device(const Communicator& host, Device device);

}  // namespace hsdp::stand_in
