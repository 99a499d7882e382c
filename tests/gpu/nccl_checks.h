// The checks of the NCCL engine that every rank of a world runs together.
#pragma once

#include "hsdp/comm/communicator.h"

namespace hsdp::gpu {

// Throws what does not hold. Rank 0 says what does.
void check_nccl_engine(Communicator& world, int replicate, int shard, Device device);
// Rank 0 prints the times of both reductions.
void measure_nccl_engine(Communicator& world, Device device);

}  // namespace hsdp::gpu
