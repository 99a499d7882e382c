// Memory that NCCL knows: Communicator::allocate on a GPU.
#pragma once

#include <cstdint>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/nccl/nccl_group.h"

namespace hsdp::comm {

// Collective over the group. From NCCL and registered with the group's communicator where the
// library can, else from the device's pool. Fails on every rank when it fails on one; the group
// stays usable. The last view must not die before the work that uses it is done.
[[nodiscard]] SharedMemory allocate_registered(NcclGroup& group, std::int64_t count, Dtype dtype);

}  // namespace hsdp::comm
