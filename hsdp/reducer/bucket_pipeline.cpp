#include "hsdp/reducer/bucket_pipeline.h"

#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/device_plan.h"
#include "hsdp/kernels/scale_and_cast.h"
#include "hsdp/kernels/sum_rows.h"
#include "hsdp/reducer/collector.h"
#include "hsdp/reducer/same_calls.h"

namespace hsdp::reducer {

BucketPipeline::BucketPipeline(Setting setting)
    : setting_(std::move(setting)),
      shard_lane_(make_lane("hsdp-shard")),
      replica_lane_(setting_.groups.shard.size() > 1 && setting_.groups.replicate.size() > 1
                        ? make_lane("hsdp-replica")
                        : shard_lane_),
      watcher_(Stream::host_worker("hsdp-watch")),
      zeros_nonfinite_(make_flag(setting_.groups.device)) {}

void BucketPipeline::drain() noexcept {
  const auto quietly = [](const auto& call) {
    try {
      call();
    } catch (...) {  // was reported when it happened
    }
  };
  quietly([this] { watcher_.synchronize(); });  // may still launch something
  send_delayed();
  quietly([this] { replica_lane_->synchronize(); });
  quietly([this] { shard_lane_->synchronize(); });
  quietly([this] { finish_hops(); });
  quietly([this] { watcher_.synchronize(); });
  quietly([this] { wait(shard_lane_->stream().record()); });
  quietly([this] { wait(replica_lane_->stream().record()); });
}

std::shared_ptr<Lane> BucketPipeline::make_lane(const char* name) const {
  return std::make_shared<Lane>(name, setting_.groups.device, setting_.outcome, setting_.issuer);
}

void BucketPipeline::launch(int number, int slot, const Plan& plan, const Event& packed,
                            std::int64_t phase) {
  launch({.bucket = number,
          .slot = slot,
          .plan = plan,
          .packed = packed,
          .arithmetic = plan->arithmetic(setting_.layout, number),
          .phase = phase});
}

void BucketPipeline::launch_zeros(int number, const Plan& plan, const Event& packed) {
  const BucketArithmetic arithmetic = plan->arithmetic(setting_.layout, number);
  launch({.bucket = number,
          .slot = arithmetic.runs_shard_hop ? 0 : kNoSlot,
          .plan = plan,
          .packed = packed,
          .arithmetic = arithmetic,
          .zeros = true});
}

void BucketPipeline::launch(const Launch& launch) {
  const bool completes = !launch.arithmetic.ends_after_shard_hop();
  if (launch.slot != kNoSlot) send_to_shard_hop(launch);
  if (on_host()) {
    if (completes) send_to_replica_hop(launch);
    return;
  }
  send_delayed();
  const int group = setting_.layout.buckets()[static_cast<std::size_t>(launch.bucket)].group;
  if (launch.slot == kNoSlot && !completes && launch.plan->group(group).reduces()) {
    // No hop runs, but readers of the carry wait for the lanes alone.
    setting_.outcome.guard(launch.plan->step, [&] { shard_lane_->stream().wait(launch.packed); });
  }
  if (!completes) return;
  const std::lock_guard lock(delayed_mutex_);
  delayed_ = launch;
}

// A bucket's replica hop runs beside the next bucket's shard hop.
void BucketPipeline::send_delayed() {
  const std::lock_guard lock(delayed_mutex_);
  if (const auto launch = std::exchange(delayed_, std::nullopt)) send_to_replica_hop(*launch);
}

void BucketPipeline::send_to_shard_hop(const Launch& launch) {
  const std::int64_t step = launch.plan->step;
  const auto reduce = [this, launch, step] {
    setting_.outcome.guard(step, [&] {
      shard_lane_->stream().wait(launch.packed);
      if (launch.zeros) zero_slot(launch);
      shard_hop(launch);
    });
    // After a failure a peer may still be reading the slot.
    if (launch.zeros || setting_.outcome.failed()) return;
    const Event free = shard_lane_->stream().record();
    setting_.outcome.guard(kNoStep, [&free] { free.throw_if_failed(); });
    if (!setting_.outcome.failed()) collector_->slot_free(launch.slot, free);
  };
  shard_lane_->issue({.run = reduce, .step = step, .place = launch.bucket, .phase = launch.phase});
}

void BucketPipeline::send_to_replica_hop(const Launch& launch) {
  const std::int64_t step = launch.plan->step;
  const auto complete_bucket = [this, launch, step] {
    setting_.outcome.guard(step, [&] {
      replica_lane_->stream().wait(launch.packed);
      if (launch.arithmetic.runs_replica_hop) {
        Operation operation = begin(OperationKind::kReplicaHop, launch);
        const Event reduced = replica_hop(launch);
        if (!reduced.complete()) {
          unfinished_.push_back({launch, reduced, std::move(operation)});
          return;
        }
        reduced.wait();  // throws what went wrong
        operation.end(ended());
      }
      after_hops(launch);
    });
  };
  replica_lane_->follow(*shard_lane_);
  replica_lane_->issue(
      {.run = complete_bucket, .step = step, .place = launch.bucket, .phase = launch.phase});
}

void BucketPipeline::zero_slot(const Launch& launch) {
  const TensorView slot = setting_.memory.staging(launch.slot, launch.bucket);
  kernels::CastAndPack args;  // without a gradient: zeros
  args.count = slot.count;
  args.out = slot.data;
  args.out_dtype = slot.dtype;
  kernels::cast_and_pack(args, shard_lane_->stream());
}

void BucketPipeline::shard_hop(const Launch& launch) {
  ReduceScatter args;
  args.in = setting_.memory.staging(launch.slot, launch.bucket);
  args.out = setting_.memory.bucket_carry(launch.bucket);
  args.cut = setting_.layout.rows(launch.bucket).joined(setting_.groups.parts);
  args.accumulate = launch.arithmetic.adds_carry;
  args.sum_exponent = launch.arithmetic.row_exponent;
  args.divisor = launch.arithmetic.shard_divisor;
  args.nonfinite = launch.plan->result->nonfinite.get();
  args.bucket = launch.bucket;
  args.planned = true;
  args.reduction = setting_.reduction;
  if (!on_host() && setting_.reduction == Reduction::kExact) {
    const int rank = setting_.groups.shard.rank();
    const ConstTensorView own = args.in.slice(args.cut->begin(rank), args.cut->length(rank));
    misaligned_bytes_ +=
        kernels::misaligned_bytes(own.data, own.dtype, nullptr, own.dtype, own.count);
  }
  Operation operation = begin(OperationKind::kShardHop, launch);
  setting_.groups.shard.reduce_scatter(args, shard_lane_->stream());
  operation.end(ended());
}

Operation BucketPipeline::begin(OperationKind kind, const Launch& launch) const {
  const TensorView data = kind == OperationKind::kShardHop
                              ? setting_.memory.staging(launch.slot, launch.bucket)
                              : setting_.memory.bucket_carry(launch.bucket);
  return {setting_.groups.operations,
          {.kind = kind,
           .step = launch.plan->step,
           .microbatch = launch.plan->microbatch,
           .index = launch.bucket,
           .bytes = static_cast<std::int64_t>(data.size_in_bytes())}};
}

Event BucketPipeline::replica_hop(const Launch& launch) {
  HopBucket args;
  args.bucket = launch.bucket;
  args.data = setting_.memory.bucket_carry(launch.bucket);
  if (setting_.groups.parts > 1) args.part = setting_.memory.bucket_result(launch.bucket);
  args.arithmetic = launch.arithmetic.replica;
  args.nonfinite = launch.plan->result->nonfinite.get();
  args.planned = true;
  Stream stream = replica_lane_->stream();
  Event reduced = setting_.hop->reduce(args, stream);
  ++replica_hop_count_;
  return reduced;
}

// Adds an earlier total. At the step's end divides, unless the hops have done so.
void BucketPipeline::after_hops(const Launch& launch) {
  using Rest = BucketArithmetic::Rest;
  const BucketArithmetic& arithmetic = launch.arithmetic;
  if (arithmetic.rest == Rest::kNothing || launch.zeros) return;
  const TensorView result = setting_.memory.bucket_result(launch.bucket);
  if (arithmetic.rest == Rest::kDivide) {
    return divide(launch.bucket, arithmetic.rest_divisor, *launch.plan, replica_lane_->stream());
  }
  const TensorView total = setting_.memory.bucket_total(launch.bucket);
  const std::array<const void*, 1> rows{arithmetic.rest_reads_carry ? result.data : total.data};
  const std::array<void*, 1> outs{arithmetic.rest == Rest::kJoinTotal ? result.data : total.data};
  kernels::SumRows args;
  args.rows = rows;
  args.outs = outs;
  const bool adds = arithmetic.rest_reads_carry && arithmetic.rest_reads_total;
  args.add = adds ? total.data : nullptr;
  args.spec.row_dtype = args.spec.out_dtype = result.dtype;
  args.spec.divisor = arithmetic.rest_divisor;
  args.count = result.count;
  args.nonfinite = launch.plan->result->nonfinite.get();
  kernels::sum_rows(args, replica_lane_->stream());
}

void BucketPipeline::divide(int bucket, double divisor, const MicrobatchPlan& plan,
                            const Stream& stream) {
  const TensorView result = setting_.memory.bucket_result(bucket);
  kernels::ScaleAndCast args;
  args.in = args.out = result.data;
  args.in_dtype = args.out_dtype = result.dtype;
  args.count = result.count;
  args.divisor = divisor;
  args.nonfinite = plan.result->nonfinite.get();
  kernels::scale_and_cast(args, stream);
}

// Takes what all ranks have counted from their words.
void BucketPipeline::count(const MicrobatchPlan& plan, const Words& words) {
  StepResult& result = *plan.result;
  const auto replica = static_cast<std::size_t>(setting_.groups.replica());
  const std::vector<std::int64_t>& counts = words.counts();
  result.world_count = std::accumulate(counts.begin(), counts.end(), result.world_count);
  if (replica < counts.size()) result.shard_count += counts[replica];
  if (!plan.ends_step() || plan.count_by == CountBy::kNothing) return;
  result.divide_factor = counted_divide_factor(result.world_count, plan.summed_microbatches);
  if (!plan.divides_late()) return;
  const double divisor = *result.divide_factor * plan.loss_scale();
  for (int b = 0; b < static_cast<int>(setting_.layout.buckets().size()); ++b) {
    divide(b, divisor, plan, shard_lane_->stream());
  }
}

// Runs after both lanes' buckets, also for a dropped step, whose hops still write to the carry.
void BucketPipeline::finish_hops() {
  if (unfinished_.empty()) return;
  while (!unfinished_.empty()) {
    Unfinished next = std::move(unfinished_.front());
    unfinished_.pop_front();
    std::exception_ptr error;
    try {
      if (on_host()) {
        next.reduced.wait();
      } else {
        replica_lane_->stream().wait(next.reduced);
        late_.push_back(next.reduced);
      }
      next.operation.end(ended());
    } catch (...) {
      next.operation.end(OperationState::kFailed);
      error = std::current_exception();
    }
    if (error) setting_.outcome.fail(std::move(error));
    setting_.outcome.guard(next.launch.plan->step, [&] { after_hops(next.launch); });
  }
  shard_lane_->stream().wait(replica_lane_->stream().record());
}

void BucketPipeline::join_lanes() {
  send_delayed();
  shard_lane_->follow(*replica_lane_);
}

void BucketPipeline::end(const Ending& ending) {
  join_lanes();
  const std::int64_t step = ending.plan->step;
  const auto end_it = [this, ending, step] {
    finish_hops();
    setting_.outcome.guard(step, [&] { run_end(ending); });
  };
  // After all buckets, also those of other Reducers.
  const bool ends_step = ending.plan->ends_step();
  shard_lane_->issue({.run = end_it, .step = step, .may_drop = true, .ends_step = ends_step});
}

// [Note: dropped step]
void BucketPipeline::end_drop(const Ending& ending) {
  watch([this, ending, late = shard_lane_->come_late()] {
    Operation operation(setting_.groups.operations, word_of(ending));
    auto words = setting_.agreement.collect_patiently(ending.word);
    operation.end(words ? OperationState::kDone : OperationState::kFailed);
    if (!words) return;
    send_zeros(*words, *ending.plan);
    Ending known = ending;
    known.words = std::move(words);
    end(known);
  });
}

// With the largest counts of any rank, as on the other ranks.
void BucketPipeline::send_zeros(const Words& words, const MicrobatchPlan& dropped) {
  const std::optional<StatusWord> sent = words.sent();
  if (!sent) return;
  auto plan = std::make_shared<MicrobatchPlan>(dropped);
  plan->set_groups(sent->groups);
  plan->set_divisor(sent->divide_factor == 0 ? std::nullopt : std::optional(sent->divide_factor),
                    sent->loss_scale);
  plan->result = std::make_shared<StepResult>();
  plan->result->nonfinite = zeros_nonfinite_;
  const std::vector<Bucket>& buckets = setting_.layout.buckets();
  for (int b = 0; b < static_cast<int>(buckets.size()); ++b) {
    const Bucket& bucket = buckets[static_cast<std::size_t>(b)];
    if (bucket.count == 0 || plan->group(bucket.group).sync == Sync::kNone) continue;
    launch_zeros(b, plan, {});
  }
}

OperationPlace BucketPipeline::word_of(const Ending& ending) {
  return {.kind = OperationKind::kWord,
          .step = ending.plan->step,
          .microbatch = ending.plan->microbatch,
          .turn = ending.word};
}

Words BucketPipeline::collect(const Ending& ending) {
  const Operation operation(setting_.groups.operations, word_of(ending));
  return setting_.agreement.collect(ending.word);
}

void BucketPipeline::run_end(const Ending& ending) {
  const MicrobatchPlan& plan = *ending.plan;
  if (plan.result) hold(plan.result->nonfinite);
  const Words words = ending.words ? *ending.words : collect(ending);
  StepAgreement::Judgement judgement = setting_.agreement.judge(words);
  if (judgement.mismatch) setting_.agreement.end_world(*judgement.mismatch);
  if (judgement.dropped) {
    run_when_done([this, step = plan.step, cause = std::move(judgement.cause)] {
      setting_.agreement.end_step({step, StepOutcome::kDropped, cause});
    });
    setting_.outcome.drop_step(plan.step, std::move(judgement.drop));
  } else {
    if (!ending.discards_step) count(plan, words);
    if (setting_.missing == Missing::kZero && plan.ends_step()) {
      plan.result->present = setting_.agreement.join_present(plan.step, collector_->present());
    }
    if (checks(ending)) {
      setting_.check->take(shard_lane_->stream());
    } else if (!on_host() && plan.ends_step()) {
      // On a GPU streams wait for the result, not hosts: it is valid before it is computed.
      plan.result->progress = StepResult::Progress::kAgreed;
    }
    run_when_done([this, ending, calls = calls_of(setting_.groups, setting_.hop_owner),
                   packs = collector_->record_packs()] {
      settle(ending, calls);
      collector_->let_go_of_read(packs);
    });
  }
  const bool waits = setting_.agreement.has_state() || checks(ending);
  if (!on_host() && waits) watcher_.synchronize();
  setting_.agreement.set_judged(ending.word);
  collector_->notify();
}

// At the step's end, when the device is done: exchanges whether a rank met a non-finite value.
void BucketPipeline::settle(const Ending& ending, const std::string& calls) {
  const std::int64_t step = ending.plan->step;
  if (ending.discards_step) {
    setting_.agreement.end_step({step, StepOutcome::kDropped, "it was discarded"});
  }
  if (!ending.plan->ends_step()) return;
  StepResult& result = *ending.plan->result;
  const std::vector<std::int64_t> claim =
      checks(ending) ? setting_.check->claim() : std::vector<std::int64_t>();
  setting_.agreement.post_nonfinite(step, result.nonfinite->load() != 0, calls, claim);
  const StepLooks looks{.at_calls =
                            [&](const std::vector<std::string>& of_ranks) {
                              require_same_calls(setting_.groups, setting_.hop_owner,
                                                 setting_.agreement, step, of_ranks);
                            },
                        .at_most =
                            [&](std::span<const std::int64_t> most) {
                              setting_.check->require_equal(step, most, setting_.agreement);
                            }};
  if (setting_.agreement.settle(step, looks)) {
    if (on_host()) result.nonfinite->store(1);  // for found_inf(out); a GPU may be reading it
    result.found_inf = true;
  }
  result.progress = StepResult::Progress::kKnown;
}

void BucketPipeline::run_when_done(std::function<void()> task) {
  if (on_host()) {
    task();
    return;
  }
  watch([this, done = shard_lane_->stream().record(), late = std::exchange(late_, {}),
         task = std::move(task)] {
    wait(done);
    for (const Event& reduced : late) wait(reduced);  // throws what went wrong
    task();
  });
}

void BucketPipeline::watch(std::function<void()> task) {
  watcher_.run([this, task = std::move(task)] { setting_.outcome.guard(kNoStep, task); });
}

Event BucketPipeline::run(const Lane::Work& work, std::function<void(Stream&)> task) {
  return shard_lane_->run(work, std::move(task));
}

void BucketPipeline::wait_launched() {
  await(replica_lane_->ran());
  await(shard_lane_->ran());
}

void BucketPipeline::wait_ended() {
  await(watcher_.record());  // may still launch something
  wait_launched();
  await(watcher_.record());
}

void BucketPipeline::await(const Event& event) const {
  setting_.groups.operations.await(event, [&] { event.wait(); });
}

Event BucketPipeline::done() {
  Stream stream = shard_lane_->stream();
  stream.wait(replica_lane_->stream().record());
  return stream.record();
}

void BucketPipeline::wait_idle() {
  wait_ended();
  wait(done());
  in_flight_.reap();
}

void BucketPipeline::hold(std::shared_ptr<const void> memory) {
  if (!on_host()) in_flight_.hold(shard_lane_->stream().record(), std::move(memory));
}

}  // namespace hsdp::reducer
