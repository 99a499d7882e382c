// Simulates a slow link on machines where the kernel must not shape one. The ranks communicate as
// on one host, and each then sleeps for as long as its bytes would have taken.
//
// All groups split from the communicator share the rank's link, which sends and receives at the
// same time. It simulates neither latency nor the CPU time of a network stack.
#pragma once

#include "hsdp/comm/communicator.h"

namespace hsdp::bench {

// Call on every rank of `world` or on none. `bytes_per_s`: how much each rank can send.
[[nodiscard]] Communicator behind_sleeping_link(const Communicator& world, double bytes_per_s);

}  // namespace hsdp::bench
