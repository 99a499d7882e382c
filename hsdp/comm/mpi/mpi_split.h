// What the members of a group create together over the control connection: groups and memory.
#pragma once

#include <cstdint>
#include <optional>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/mpi/mpi_group.h"

namespace hsdp::comm {

// Collective: this rank's place in the group of its color, ordered by (key, rank); nothing for a
// negative color. Fails on every rank if MPI has no tag left.
[[nodiscard]] std::optional<MpiGroup::Place> split_group(MpiGroup& group, int color, int key);

// Collective, though each rank's memory is private: if it fails on one rank, it fails on all.
[[nodiscard]] SharedMemory allocate_private(MpiGroup& group, std::int64_t count, Dtype dtype);

}  // namespace hsdp::comm
