#include "hsdp/reducer/microbatch_plan.h"

#include <algorithm>

namespace hsdp::reducer {

void MicrobatchPlan::set_divisor(std::optional<double> factor, double scale) {
  divide_factor = factor;
  loss_scale = scale;
  divisor = fp32_divisor(gradient_divide_factor(shard_size, replicate_size, true, factor), scale);
}

BucketArithmetic MicrobatchPlan::arithmetic(const Bucket& bucket) const {
  const GroupPlan& sums = group(bucket.group);
  return hop_arithmetic({.shard_size = shard_size,
                         .replicate_size = replicate_size,
                         .shard_wire = bucket.wire_dtype,
                         .replica_wire = replica_dtype.value_or(bucket.wire_dtype),
                         .local_count = sums.local_count,
                         .carry_count = sums.carry_count,
                         .has_carry = sums.has_carry,
                         .has_total = sums.has_total,
                         .replicates = sums.sync == Sync::kAll,
                         .ends_step = ends_step,
                         .divisor = divisor});
}

bool MicrobatchPlan::has(Sync sync) const {
  return std::ranges::any_of(groups, [sync](const GroupPlan& group) { return group.sync == sync; });
}

bool MicrobatchPlan::is_local() const {
  return std::ranges::all_of(groups, [](const GroupPlan& g) { return g.sync == Sync::kNone; });
}

}  // namespace hsdp::reducer
