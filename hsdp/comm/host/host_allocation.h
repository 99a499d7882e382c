// The host engine's Communicator::allocate: memory of one rank that its neighbours in a group map.
#pragma once

#include <cstdint>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/host/host_group.h"

namespace hsdp::comm {

// Collective over the group. If it fails on one rank, it fails on all; the group stays usable.
[[nodiscard]] SharedMemory allocate_shared(HostGroup& group, std::int64_t count, Dtype dtype);

}  // namespace hsdp::comm
