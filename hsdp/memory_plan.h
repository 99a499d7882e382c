// What a Reducer and its hop will hold and send on this rank, known before the first step, and what
// the optimizers and gathers that exist already do. Reducer::memory_plan() returns it; that call is
// local. Plain data, with the field names of ReducerStats.
#pragma once

#include <cstdint>
#include <optional>

#include "hsdp/reducer_options.h"

namespace hsdp {

// What steps will do, as far as it changes how much memory they take.
struct MemoryUse {
  // The dtype of local sums, which microbatches with sync = none need, and windows in which the
  // Reducer adds up. Default: accumulate_dtype if backwards = kMany or the partial sync is kNone,
  // else there are none.
  std::optional<AccumulateDtype> local_sums{};
  bool totals = false;  // some groups have sync = all before a step's end
};

struct MemoryPlan {
  std::int64_t carry_bytes = 0;
  std::int64_t total_bytes = 0;
  std::int64_t staging_bytes = 0;
  std::int64_t accumulator_bytes = 0;
  std::int64_t replica_hop_state_bytes = 0;
  std::int64_t optimizer_bytes = 0;  // of optimizers that exist already
  // On a GPU, before the Reducer is prepared, without the work memory of the engine.
  std::int64_t scratch_bytes = 0;
  std::int64_t resident_bytes = 0;  // the sum of the above
  // In addition, while gathers run: the largest message of each gather that exists already.
  std::int64_t parameter_gather_bytes = 0;
  std::int64_t shard_hop_bytes = 0;    // per microbatch that is reduced
  std::int64_t replica_hop_bytes = 0;  // per step; with LoCo, after its warm-up
};

// Calls visit(name, value) for every field, in their order.
template <typename Visit>
void visit_fields(const MemoryPlan& plan, Visit visit) {
  visit("carry_bytes", plan.carry_bytes);
  visit("total_bytes", plan.total_bytes);
  visit("staging_bytes", plan.staging_bytes);
  visit("accumulator_bytes", plan.accumulator_bytes);
  visit("replica_hop_state_bytes", plan.replica_hop_state_bytes);
  visit("optimizer_bytes", plan.optimizer_bytes);
  visit("scratch_bytes", plan.scratch_bytes);
  visit("resident_bytes", plan.resident_bytes);
  visit("parameter_gather_bytes", plan.parameter_gather_bytes);
  visit("shard_hop_bytes", plan.shard_hop_bytes);
  visit("replica_hop_bytes", plan.replica_hop_bytes);
}

}  // namespace hsdp
