// The command line of hsdp_plan.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/reducer_options.h"

namespace hsdp {

struct PlanOptions {
  std::vector<ParameterSpec> parameters;
  int replicate = 1;
  int shard = 1;
  int stage = 2;
  bool loco = false;
  ReducerOptions reducer;  // without a hop
  DeviceType device = DeviceType::kCuda;
  std::int64_t microbatches = 1;
  std::optional<double> shard_bandwidth;  // bytes a second
  std::optional<double> replica_bandwidth;
  bool json = false;
  std::string message;  // if not empty, print it and exit 0 (--help, --version)
};

// Throws UsageError for an invalid command line, and as read_safetensors().
[[nodiscard]] PlanOptions parse_plan_options(int argc, const char* const* argv);

}  // namespace hsdp
