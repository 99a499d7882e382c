// What a Reducer and its hop allocate and send on one rank of a mesh, by the functions that size
// their memory. Local: the mesh need not exist.
#pragma once

#include "hsdp/bucket_layout.h"
#include "hsdp/memory_plan.h"
#include "hsdp/reducer/gradient_memory.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/parameter_table.h"
#include "hsdp/replica_hop.h"

namespace hsdp::reducer {

// What the memory of a rank depends on.
struct PlannedRank {
  Device device{};
  SliceOwner owner{};
  int shard_size = 1;
  int replicate_size = 1;
};

[[nodiscard]] inline PlannedRank planned_rank(const Groups& groups) {
  return {groups.device, groups.owner(), groups.shard.size(), groups.replicate.size()};
}

// The HopPlan for a Reducer's hop, except its `memory`.
[[nodiscard]] HopPlan make_hop_plan(const ParameterTable& parameters, const ReducerOptions& options,
                                    const BucketLayout& layout, const GradientMemory& memory,
                                    const PlannedRank& rank);

[[nodiscard]] Reduction reduction_of(const ReducerOptions& options);

// UsageError for a hop that cannot shard results over the mesh, if the options ask for that.
void require_scattered_results(const ReducerOptions& options);

// `options` are complete, as agreed_options.h makes them, and `layout` is that of the parameters.
//
// The hop's need. Takes most of the time for a large model; the same for all parts of a shard rank.
[[nodiscard]] HopNeed plan_hop(const ParameterTable& parameters, const ReducerOptions& options,
                               const BucketLayout& layout, const PlannedRank& rank);
// The plan with that need of the hop, without optimizers and gathers. Scratch is the Reducer's.
[[nodiscard]] MemoryPlan plan_memory(const ParameterTable& parameters,
                                     const ReducerOptions& options, const BucketLayout& layout,
                                     const PlannedRank& rank, const MemoryUse& use,
                                     const HopNeed& hop);

}  // namespace hsdp::reducer
