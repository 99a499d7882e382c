// The fields of a MemoryPlan by name, and what stats() has counted under the same names.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <type_traits>

#include "hsdp/memory_plan.h"
#include "hsdp/reducer_stats.h"

namespace hsdp::test {

using PlannedFields = std::map<std::string, std::int64_t>;

inline PlannedFields fields_of(const MemoryPlan& plan) {
  PlannedFields fields;
  visit_fields(plan, [&fields](const char* name, std::int64_t value) { fields[name] = value; });
  return fields;
}

// Between gathers, when no message is held. The traffic is that of one of `reduced` microbatches
// and of one of `steps`.
inline PlannedFields counted_fields(const ReducerStats& stats, int reduced, int steps) {
  PlannedFields fields = fields_of(MemoryPlan());
  visit_fields(stats, [&fields](const std::string& name, const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::int64_t>) {
      if (fields.contains(name)) fields[name] = value;
    }
  });
  fields["shard_hop_bytes"] /= reduced;
  fields["replica_hop_bytes"] /= steps;
  return fields;
}

}  // namespace hsdp::test
