// The checks of the NCCL engine that every rank of a world runs together.
#pragma once

#include "hsdp/comm/communicator.h"

namespace hsdp::gpu {

// Throws an Error that names the first check that fails. Rank 0 prints those that hold.
void check_nccl_engine(Communicator& world, int replicate, int shard, Device device);
// Rank 0 prints the times of both reductions.
void measure_nccl_engine(Communicator& world, Device device);

}  // namespace hsdp::gpu
