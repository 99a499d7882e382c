#include "hsdp/reducer/frozen.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/reducer/compare_lines.h"
#include "hsdp/reducer/plan_memory.h"
#include "hsdp/reducer/scratch_need.h"
#include "hsdp/reducer/together.h"

namespace hsdp::reducer {
namespace {

void compare_registrations(const ParameterTable& parameters, Communicator& world) {
  constexpr auto kRemedy =
      "register the same parameters in the same order on every rank, and begin the Reducers in one "
      "order";
  const std::optional<LineDifference> difference =
      compare_lines(world, parameters.describe(), "compare its registered parameters");
  if (!difference) {
    if (parameters.size() > 0) return;
    throw UsageError(
        {.where = "reducer: begin_microbatch",
         .expected = "registered parameters",
         .got = "none",
         .remedy = "attach a model or register parameters before the first microbatch"});
  }
  const std::string rank = comm::ranks_text({difference->rank}, world.size());
  const std::vector<int> ranks{world.world_rank(difference->rank)};
  if (difference->is_empty) {
    throw MismatchError({.where = "reducer: begin_microbatch",
                         .expected = "registered parameters on every rank",
                         .got = "none on " + rank,
                         .remedy = kRemedy},
                        ranks);
  }
  throw MismatchError({.where = "reducer: parameter " + std::to_string(difference->line),
                       .expected = difference->expected + " on every rank",
                       .got = difference->got + " on " + rank,
                       .remedy = kRemedy},
                      ranks);
}

// Packing ahead needs a core for the waiting thread beside those that reduce. A GPU does both.
PackOrder pack_order(Device device, int shard_size) {
  if (device.type != DeviceType::kHost) return PackOrder::kAhead;
  cpu_set_t cores;
  const bool known = ::sched_getaffinity(0, sizeof cores, &cores) == 0;
  return known && CPU_COUNT(&cores) <= shard_size ? PackOrder::kInTurn : PackOrder::kAhead;
}

}  // namespace

Frozen::Frozen(const FrozenSetting& setting)
    : device_(setting.groups.device), outcome_(setting.outcome) {
  const ReducerOptions& options = setting.options;
  Groups& groups = setting.groups;
  Communicator& world = groups.world;
  compare_registrations(setting.parameters, world);
  together(world, "lay out its buckets", [&] {
    if (groups.parts > 1) require_scattered_results(options);
    layout_ = setting.parameters.make_layout(groups.slice_count());
    memory_.emplace(setting.parameters, *layout_, groups.owner(), groups.device,
                    options.accumulate_on, setting.memory);
    scratch_ = ScratchReserve(
        groups.device,
        scratch_need(setting.parameters, *layout_, groups.owner().slice_rank(), groups.device));
    for (Flag& flag : flags_) flag = make_flag(device_);
  });
  sends_f16_ = options.replica_dtype == Dtype::kF16 ||
               std::ranges::find(layout_->buckets(), Dtype::kF16, &Bucket::wire_dtype) !=
                   layout_->buckets().end();
  together(world, "allocate its carry", [&] { memory_->allocate_carry(groups.replicate); });
  if (groups.replicate.size() > 1) {
    hop_.emplace(groups, options.replica_hop, [&] {
      HopPlan plan =
          make_hop_plan(setting.parameters, options, *layout_, *memory_, planned_rank(groups));
      plan.memory = setting.memory;
      return plan;
    });
  }
  together(world, "allocate its staging buckets",
           [&] { memory_->allocate_staging(groups.shard, reduction_of(options)); });
  scratch_held_ = setting.memory.hold(
      MemoryKind::kScratch,
      scratch_.size_bytes() + groups.shard.reserved_bytes() + (hop_ ? hop_->reserved_bytes() : 0));
  const std::shared_ptr<IssueOrder::Issuer> issuer = add_issuer(groups);
  together(world, "start its lanes", [&] {
    const std::int64_t every = groups.parts > 1 ? 0 : options.verify_every;
    check_.emplace(every, setting.parameters, *layout_, *memory_, groups);
    pipeline_.emplace(BucketPipeline::Setting{
        *layout_, *memory_, setting.outcome, setting.agreement, groups, options.replica_hop,
        reduction_of(options), options.missing, issuer, hop_ ? &*hop_ : nullptr, &*check_});
    collector_.emplace(Collector::Setting{
        setting.parameters, *layout_, *memory_, *pipeline_, setting.outcome, world, groups.device,
        pack_order(groups.device, groups.shard.size()), groups.shard.size() > 1,
        options.missing == Missing::kZero, issuer, groups.operations});
    pipeline_->set_collector(*collector_);
  });
  outcome_.set_on_change([this] { collector_->notify(); });
}

Flag Frozen::step_flag() {
  for (const Flag& flag : flags_) {
    if (flag.use_count() > 1) continue;
    std::atomic_thread_fence(std::memory_order_acquire);  // after its last holder
    flag->store(0, std::memory_order_relaxed);
    return flag;
  }
  return make_flag(device_);
}

Frozen::~Frozen() {
  pipeline_->drain();  // its tasks use the rest of this
  outcome_.set_on_change([] {});
}

}  // namespace hsdp::reducer
