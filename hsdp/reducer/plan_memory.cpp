#include "hsdp/reducer/plan_memory.h"

#include "hsdp/divide_factors.h"
#include "hsdp/error.h"
#include "hsdp/reducer/scratch_need.h"

namespace hsdp::reducer {

Reduction reduction_of(const ReducerOptions& options) {
  return options.reduction == "native" ? Reduction::kNative : Reduction::kExact;
}

void require_scattered_results(const ReducerOptions& options) {
  if (options.replica_hop->scatters()) return;
  throw UsageError({.where = "reducer: replica_hop",
                    .expected = "a hop that scatters, as shard_over=\"mesh\" needs",
                    .got = "'" + options.replica_hop->describe() +
                           "', which gives every replica the whole total",
                    .remedy = "use the plain hop, LocoHop, or shard_over=\"shard\""});
}

HopPlan make_hop_plan(const ParameterTable& parameters, const ReducerOptions& options,
                      const BucketLayout& layout, const GradientMemory& memory,
                      const PlannedRank& rank) {
  HopPlan plan;
  for (int p = 0; p < parameters.size(); ++p) {
    plan.parameters.push_back(parameters.hop_parameter(p));
  }
  const int parts = rank.owner.parts;
  const int first = rank.owner.shard_rank * parts;
  for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
    const Bucket& bucket = layout.buckets()[static_cast<std::size_t>(b)];
    std::vector<ParameterRange>& ranges = plan.ranges.emplace_back();
    const RowCut cut = layout.rows(b).rows(first, parts);
    for (int part = 0; part < parts; ++part) {
      for (ParameterRange range : layout.ranges(b, first + part)) {
        range.offset += cut.begin(part);
        ranges.push_back(range);
      }
    }
    if (parts > 1) plan.cuts.push_back(cut);
    std::vector<TensorView>& data = plan.data.emplace_back();
    data.push_back(memory.bucket_carry(b));
    if (parameters.group_count() > 1) {  // some may end earlier, with totals
      data.push_back({nullptr, data.back().count, data.back().dtype, rank.device});
    }
    plan.wires.push_back(replica_wire(bucket.wire_dtype, options.replica_dtype));
  }
  plan.replicate_size = rank.replicate_size;
  plan.reduction = reduction_of(options);
  plan.device = rank.device;
  return plan;
}

HopNeed plan_hop(const ParameterTable& parameters, const ReducerOptions& options,
                 const BucketLayout& layout, const PlannedRank& rank) {
  if (rank.replicate_size == 1) return {};
  if (rank.owner.parts > 1) require_scattered_results(options);
  const GradientMemory memory(parameters, layout, rank.owner, rank.device, options.accumulate_on,
                              {});
  return options.replica_hop->need(make_hop_plan(parameters, options, layout, memory, rank));
}

MemoryPlan plan_memory(const ParameterTable& parameters, const ReducerOptions& options,
                       const BucketLayout& layout, const PlannedRank& rank, const MemoryUse& use,
                       const HopNeed& hop) {
  const GradientMemory memory(parameters, layout, rank.owner, rank.device, options.accumulate_on,
                              {});
  MemoryPlan plan;
  plan.carry_bytes = memory.carry_bytes();
  if (use.totals) plan.total_bytes = memory.total_bytes();
  if (use.local_sums) plan.accumulator_bytes = memory.accumulator_bytes(*use.local_sums);
  plan.staging_bytes = memory.staging_bytes(rank.shard_size) + hop.staging_bytes;
  plan.replica_hop_state_bytes = hop.state_bytes;
  plan.replica_hop_bytes = hop.wire_bytes;
  if (rank.shard_size > 1) {
    for (const Bucket& bucket : layout.buckets()) {
      plan.shard_hop_bytes += message_bytes(bucket.count, bucket.wire_dtype, reduction_of(options));
    }
  }
  if (rank.device.type != DeviceType::kHost) {
    plan.scratch_bytes = static_cast<std::int64_t>(
        scratch_need(parameters, layout, rank.owner.slice_rank(), rank.device));
  }
  return plan;
}

}  // namespace hsdp::reducer
