#include "hsdp/reducer/microbatch_plan.h"

#include <algorithm>

namespace hsdp::reducer {

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

std::string MicrobatchPlan::sync_text() const {
  std::string text;
  for (const GroupPlan& group : groups) {
    if (!text.empty()) text += " ";
    text += group.sync == Sync::kNone ? "none" : group.sync == Sync::kShard ? "shard" : "all";
  }
  return text;
}

}  // namespace hsdp::reducer
