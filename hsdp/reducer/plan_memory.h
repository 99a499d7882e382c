// What a Reducer and its hop take and send on one rank of a mesh, by the functions that size their
// memory. Local: no rank but the calling process has to exist.
#pragma once

#include "hsdp/bucket_layout.h"
#include "hsdp/memory_plan.h"
#include "hsdp/reducer/gradient_memory.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/parameter_table.h"
#include "hsdp/replica_hop.h"

namespace hsdp::reducer {

// A rank of a mesh, as far as its memory depends on it.
struct PlannedRank {
  Device device{};
  SliceOwner owner{};
  int shard_size = 1;
  int replicate_size = 1;
};

[[nodiscard]] inline PlannedRank planned_rank(const Groups& groups) {
  return {groups.device, groups.owner(), groups.shard.size(), groups.replicate.size()};
}

// What the hop of a Reducer is prepared with, but for the count of its memory.
[[nodiscard]] HopPlan make_hop_plan(const ParameterTable& parameters, const ReducerOptions& options,
                                    const BucketLayout& layout, const GradientMemory& memory,
                                    const PlannedRank& rank);

[[nodiscard]] Reduction reduction_of(const ReducerOptions& options);

// UsageError for a hop that results sharded over the mesh do not go with.
void require_scattered_results(const ReducerOptions& options);

// `options` are complete, as agreed_options.h makes them, and `layout` is that of the parameters.
//
// Of the hop: the same for all parts of a shard rank, and of a large model most of the work.
[[nodiscard]] HopNeed plan_hop(const ParameterTable& parameters, const ReducerOptions& options,
                               const BucketLayout& layout, const PlannedRank& rank);
// With that of the hop; without what others hold, optimizers and gathers. Scratch is the Reducer's.
[[nodiscard]] MemoryPlan plan_memory(const ParameterTable& parameters,
                                     const ReducerOptions& options, const BucketLayout& layout,
                                     const PlannedRank& rank, const MemoryUse& use,
                                     const HopNeed& hop);

}  // namespace hsdp::reducer
