// Adapts a world of hsdp to the Group that the benchmarks take.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "hsdp/comm/world.h"
#include "measurement.h"

namespace hsdp::bench {

// `world` must outlive the group.
inline Group group_of(Communicator& world, const std::string& system = "") {
  Group group{.system = system, .rank = world.rank(), .size = world.size()};
  group.barrier = [&world] { world.barrier(); };
  group.max = [&world](double value) {
    std::vector<double> all(static_cast<std::size_t>(world.size()));
    world.all_gather({&value, 1, Dtype::kF64}, {all.data(), world.size(), Dtype::kF64});
    return *std::max_element(all.begin(), all.end());
  };
  return group;
}

}  // namespace hsdp::bench
