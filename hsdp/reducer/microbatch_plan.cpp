#include "hsdp/reducer/microbatch_plan.h"

#include <algorithm>
#include <utility>

namespace hsdp::reducer {

void MicrobatchPlan::set_divisor(std::optional<double> factor, double scale,
                                 std::int64_t microbatches) {
  divide_factor_ = factor;
  loss_scale_ = scale;
  divisor_ = gradient_divide_factor(shard_size, replicate_size, true, factor, microbatches) * scale;
}

void MicrobatchPlan::set_counted_factor(double factor) {
  counted_factor_ = factor;
  divisor_ = factor * loss_scale_;
}

void MicrobatchPlan::set_groups(std::vector<GroupPlan> groups) {
  groups_ = std::move(groups);
  ends_step_ =
      std::ranges::all_of(groups_, [](const GroupPlan& g) { return g.sync == Sync::kAll; });
}

void MicrobatchPlan::count_backwards(const std::vector<std::int64_t>& counts) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].local_count += counts[g] - 1;
    groups_[g].carry_count += counts[g] - 1;
  }
}

void MicrobatchPlan::raise_counts(const std::vector<GroupPlan>& theirs) {
  for (std::size_t g = 0; g < std::min(groups_.size(), theirs.size()); ++g) {
    groups_[g].local_count = std::max(groups_[g].local_count, theirs[g].local_count);
    groups_[g].carry_count = std::max(groups_[g].carry_count, theirs[g].carry_count);
  }
}

BucketArithmetic MicrobatchPlan::arithmetic(const BucketLayout& layout, int number) const {
  const auto index = static_cast<std::size_t>(number);
  const Bucket& bucket = layout.buckets()[index];
  const GroupPlan& sums = group(bucket.group);
  return hop_arithmetic({.shard_size = shard_size,
                         .replicate_size = replicate_size,
                         .shard_wire = bucket.wire_dtype,
                         .replica_wire = replica_wire(bucket.wire_dtype, replica_dtype),
                         .local_count = sums.local_count,
                         .carry_count = sums.carry_count,
                         .has_carry = sums.has_carry,
                         .has_total = sums.has_total,
                         .replicates = sums.sync == Sync::kAll,
                         .ends_step = ends_step_,
                         .divisor = divides_late() ? 1.0 : divisor_,
                         .means = !means.empty() && means[index] != 0});
}

bool MicrobatchPlan::has(Sync sync) const {
  return std::ranges::any_of(groups_,
                             [sync](const GroupPlan& group) { return group.sync == sync; });
}

bool MicrobatchPlan::is_local() const {
  return std::ranges::all_of(groups_, [](const GroupPlan& g) { return g.sync == Sync::kNone; });
}

}  // namespace hsdp::reducer
