// What the members of a group make together over the control connection: groups and memory.
#pragma once

#include <cstdint>
#include <optional>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/mpi/mpi_group.h"

namespace hsdp::comm {

// Collective: this rank's place in the group of its color, ordered by (key, rank); none for a
// negative color. Fails on every rank when MPI has no tag left for it.
[[nodiscard]] std::optional<MpiGroup::Place> split_group(MpiGroup& group, int color, int key);

// Collective, though each rank's memory is its own: it fails on every rank when it fails on one.
[[nodiscard]] SharedMemory allocate_private(MpiGroup& group, std::int64_t count, Dtype dtype);

}  // namespace hsdp::comm
