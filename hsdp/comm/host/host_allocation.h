// Memory of one rank that its neighbours in a group map: the host engine's Communicator::allocate.
#pragma once

#include <cstdint>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/host/host_group.h"

namespace hsdp::comm {

// Collective over the group. Fails on every rank when it fails on one; the group stays usable.
[[nodiscard]] SharedMemory allocate_shared(HostGroup& group, std::int64_t count, Dtype dtype);

}  // namespace hsdp::comm
