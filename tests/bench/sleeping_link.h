// A slow link for machines on which the kernel may not shape one: the ranks talk as they do on one
// host, and each then sleeps for as long as its bytes would have taken.
//
// All groups that are split from the communicator share the rank's link, which sends and receives
// at once. Latency and the processor time of a network stack are left out.
#pragma once

#include "hsdp/comm/communicator.h"

namespace hsdp::bench {

// On every rank of it or on none. `bytes_per_s`: what a rank may send.
[[nodiscard]] Communicator behind_sleeping_link(const Communicator& world, double bytes_per_s);

}  // namespace hsdp::bench
