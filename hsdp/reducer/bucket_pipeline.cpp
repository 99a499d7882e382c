#include "hsdp/reducer/bucket_pipeline.h"

#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/scale_and_cast.h"
#include "hsdp/kernels/sum_rows.h"
#include "hsdp/reducer/collector.h"

namespace hsdp::reducer {
namespace {

constexpr std::int64_t kNeverDropped = std::numeric_limits<std::int64_t>::max();  // a step

}  // namespace

BucketPipeline::BucketPipeline(Setting setting)
    : setting_(std::move(setting)),
      has_shard_hop_(setting_.shard_group.size() > 1),
      has_replica_hop_(setting_.replicate_group.size() > 1),
      shard_(make_lane("hsdp-shard")),
      replica_(make_second_lane()),
      watcher_(Stream::host_worker("hsdp-watch")),
      zeros_nonfinite_(make_flag(setting_.device)) {}

void BucketPipeline::drain() noexcept {
  const auto quietly = [](const auto& call) {
    try {
      call();
    } catch (...) {  // was reported when it happened
    }
  };
  quietly([this] { watcher_.synchronize(); });  // may still launch something
  send_delayed();
  quietly([this] { replica_.host.synchronize(); });
  quietly([this] { shard_.host.synchronize(); });
  quietly([this] { watcher_.synchronize(); });
  quietly([this] { wait(shard_.device.record()); });
  quietly([this] { wait(replica_.device.record()); });
}

BucketPipeline::Lane BucketPipeline::make_lane(const char* name) const {
  if (on_host()) return {Stream::host_worker(name), Stream::inline_host()};
  return {setting_.issuer->stream(), Stream::create(setting_.device, name)};
}

// A second lane pays only when both hops exist. A GPU's has the same thread: collectives must be
// issued in one order on every rank.
BucketPipeline::Lane BucketPipeline::make_second_lane() const {
  if (!has_shard_hop_ || !has_replica_hop_) return shard_;
  return make_lane("hsdp-replica");
}

void BucketPipeline::guarded(std::int64_t step, const std::function<void()>& task) {
  if (setting_.outcome.skips(step)) return;
  std::exception_ptr error;
  try {
    task();
  } catch (...) {
    error = std::current_exception();
  }
  // Told after the handler, when this thread holds no share of the exception any more.
  if (error) setting_.outcome.fail(std::move(error));
}

void BucketPipeline::run_ordered(int place, std::int64_t step, std::function<void()> task,
                                 bool may_drop) {
  if (on_host()) {
    shard_.host.run(std::move(task));
  } else {
    setting_.issuer->run_ordered({.run = std::move(task),
                                  .place = place,
                                  .skipped = [this, step] { return setting_.outcome.skips(step); },
                                  .may_skip_later = may_drop});
  }
}

void BucketPipeline::launch(int number, int slot, const Plan& plan, const Event& packed) {
  launch({.bucket = number,
          .slot = slot,
          .plan = plan,
          .packed = packed,
          .arithmetic = plan->arithmetic(bucket(number))});
}

void BucketPipeline::launch_zeros(int number, const Plan& plan, const Event& packed) {
  const BucketArithmetic arithmetic = plan->arithmetic(bucket(number));
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
  if (!completes) return;
  const std::lock_guard lock(delayed_mutex_);
  delayed_ = launch;
}

// So that the shard hop of a bucket and the replica hop of the one before run beside each other.
void BucketPipeline::send_delayed() {
  const std::lock_guard lock(delayed_mutex_);
  if (const auto launch = std::exchange(delayed_, std::nullopt)) send_to_replica_hop(*launch);
}

void BucketPipeline::send_to_shard_hop(const Launch& launch) {
  run_ordered(launch.bucket, launch.plan->step, [this, launch] {
    guarded(launch.plan->step, [&] {
      shard_.stream().wait(launch.packed);
      if (launch.zeros) zero_slot(launch);
      reduce_scatter(launch);
    });
    // After a failure a peer may still be reading the slot, and nothing is sent any more.
    if (launch.zeros || setting_.outcome.failed()) return;
    collector_->slot_free(launch.slot, shard_.stream().record());
  });
}

void BucketPipeline::send_to_replica_hop(const Launch& launch) {
  const auto complete_bucket = [this, launch] {
    guarded(launch.plan->step, [&] {
      Stream stream = replica_.stream();
      stream.wait(launch.packed);
      stream.wait(shard_.stream().record());
      complete(launch);
    });
  };
  if (!on_host()) return run_ordered(launch.bucket, launch.plan->step, complete_bucket);
  if (!replica_.host.same_queue(shard_.host)) replica_.host.wait(shard_.host.record());
  replica_.host.run(complete_bucket);
}

void BucketPipeline::zero_slot(const Launch& launch) {
  const TensorView slot = setting_.memory.staging(launch.slot, bucket(launch.bucket));
  kernels::CastAndPack args;  // of no gradient
  args.count = slot.count;
  args.out = slot.data;
  args.out_dtype = slot.dtype;
  kernels::cast_and_pack(args, shard_.stream());
}

void BucketPipeline::reduce_scatter(const Launch& launch) {
  const Bucket& b = bucket(launch.bucket);
  ReduceScatter args;
  args.in = setting_.memory.staging(launch.slot, b);
  args.out = setting_.memory.carry(b);
  args.cut = b.rows;
  args.accumulate = launch.arithmetic.adds_carry;
  args.sum_exponent = launch.arithmetic.row_exponent;
  args.divisor = launch.arithmetic.shard_divisor;
  args.nonfinite = launch.plan->result->nonfinite.get();
  args.bucket = launch.bucket;
  args.reduction = setting_.reduction;
  setting_.shard_group.reduce_scatter(args, shard_.stream());
  ++counts_.reduce_scatter_count;
  counts_.shard_hop_bytes += sent_bytes(args.in.count, args.in.dtype);
}

std::int64_t BucketPipeline::sent_bytes(std::int64_t count, Dtype wire) const {
  const bool widened = setting_.reduction == Reduction::kNative;
  return count * static_cast<std::int64_t>(size_bytes(widened ? Dtype::kF32 : wire));
}

// Sums the shard over the replicas, joins an earlier total, divides at the step's end.
void BucketPipeline::complete(const Launch& launch) {
  if (launch.arithmetic.runs_replica_hop) run_replica_hop(launch);
  if (!launch.zeros) run_rest(launch);
}

void BucketPipeline::run_replica_hop(const Launch& launch) {
  ReplicaShard shard;
  shard.data = setting_.memory.carry(bucket(launch.bucket));
  shard.arithmetic = launch.arithmetic.replica;
  shard.bucket = launch.bucket;
  const std::vector<ParameterRange> ranges =
      shard_ranges(setting_.layout, launch.bucket, setting_.shard_group.rank());
  shard.parameters = ranges;
  shard.nonfinite = launch.plan->result->nonfinite.get();
  shard.reduction = setting_.reduction;
  Stream stream = replica_.stream();
  setting_.hop->reduce(setting_.replicate_group, shard, stream);
  ++counts_.all_reduce_count;
  counts_.replica_hop_bytes += sent_bytes(shard.data.count, shard.arithmetic.wire);
}

void BucketPipeline::run_rest(const Launch& launch) {
  using Rest = BucketArithmetic::Rest;
  const BucketArithmetic& arithmetic = launch.arithmetic;
  if (arithmetic.rest == Rest::kNothing) return;
  const Bucket& b = bucket(launch.bucket);
  const TensorView carry = setting_.memory.carry(b);
  if (arithmetic.rest == Rest::kDivide) {
    kernels::ScaleAndCast args;
    args.in = args.out = carry.data;
    args.count = carry.count;
    args.divisor = arithmetic.rest_divisor;
    args.nonfinite = launch.plan->result->nonfinite.get();
    return kernels::scale_and_cast(args, replica_.stream());
  }
  const TensorView total = setting_.memory.total(b);
  const std::array<const void*, 1> rows{arithmetic.rest_reads_carry ? carry.data : total.data};
  const std::array<void*, 1> outs{arithmetic.rest == Rest::kJoinTotal ? carry.data : total.data};
  kernels::SumRows args;
  args.rows = rows;
  args.outs = outs;
  const bool adds = arithmetic.rest_reads_carry && arithmetic.rest_reads_total;
  args.add = adds ? GradientMemory::floats(total) : nullptr;
  args.spec.divisor = arithmetic.rest_divisor;
  args.count = carry.count;
  args.nonfinite = launch.plan->result->nonfinite.get();
  kernels::sum_rows(args, replica_.stream());
}

void BucketPipeline::join_streams() {
  send_delayed();
  if (!replica_.host.same_queue(shard_.host)) shard_.host.wait(replica_.host.record());
  if (!on_host()) shard_.host.run([this] { shard_.stream().wait(replica_.stream().record()); });
}

void BucketPipeline::end(const Ending& ending) {
  join_streams();
  // After all buckets: of several Reducers the others' buckets come first.
  run_ordered(
      IssueOrder::kAfterBuckets, ending.step,
      [this, ending] { guarded(ending.step, [&] { run_end(ending); }); }, true);
}

// [Note: dropped step]
void BucketPipeline::end_drop(const Ending& ending) {
  watch([this, ending] {
    auto words = setting_.agreement.collect_patiently(ending.word);
    if (!words) return;
    if (const StatusWord* const sent = find_sender(*words)) send_zeros(*sent, ending.step);
    Ending known = ending;
    known.words = std::move(words);
    end(known);
  });
}

void BucketPipeline::send_zeros(const StatusWord& sent, std::int64_t step) {
  auto plan = std::make_shared<MicrobatchPlan>();
  plan->step = step;
  plan->groups = sent.groups;
  plan->ends_step = !plan->has(Sync::kNone) && !plan->has(Sync::kShard);
  plan->shard_size = setting_.shard_group.size();
  plan->replicate_size = setting_.replicate_group.size();
  plan->set_divisor(sent.divide_factor == 0 ? std::nullopt : std::optional(sent.divide_factor),
                    sent.loss_scale);
  plan->replica_dtype = setting_.replica_dtype;
  plan->result = std::make_shared<StepResult>();
  plan->result->nonfinite = zeros_nonfinite_;
  const std::vector<Bucket>& buckets = setting_.layout.buckets();
  for (int b = 0; b < static_cast<int>(buckets.size()); ++b) {
    const Bucket& bucket = buckets[static_cast<std::size_t>(b)];
    if (bucket.rows.count() == 0 || plan->group(bucket.group).sync == Sync::kNone) continue;
    launch_zeros(b, plan, {});
  }
}

void BucketPipeline::run_end(const Ending& ending) {
  if (ending.result) hold(ending.result->nonfinite);
  StepAgreement::Verdict verdict = setting_.agreement.judge(
      ending.words ? *ending.words : setting_.agreement.collect(ending.word));
  if (verdict.dropped) {
    run_when_done([this] { setting_.hop->end_step(false); });
    // This thread keeps no share of the error: whoever raises it destroys it.
    setting_.outcome.drop_step(ending.step, std::move(verdict.error));
  } else {
    // On a GPU the result stands before the device has computed it: streams wait for it, not hosts.
    if (!on_host() && ending.ends_step) ending.result->progress = StepResult::Progress::kAgreed;
    run_when_done([this, ending, packs = collector_->record_packs()] {
      settle(ending);
      collector_->let_go_of_read(packs);
    });
  }
  if (!on_host() && setting_.hop->has_state()) watcher_.synchronize();
  setting_.agreement.set_judged(ending.word);
  collector_->notify();
}

// When the device is done, at the step's end: tells the others whether this rank met a non-finite
// value, and hears theirs.
void BucketPipeline::settle(const Ending& ending) {
  if (ending.discards_step) setting_.hop->end_step(false);
  if (!ending.ends_step) return;
  StepResult& result = *ending.result;
  if (!on_host()) result.progress = StepResult::Progress::kComputed;
  if (setting_.agreement.any(ending.word, result.nonfinite->load() != 0)) result.found_inf = true;
  setting_.hop->end_step(!result.found_inf);
  result.progress = StepResult::Progress::kKnown;
}

void BucketPipeline::run_when_done(std::function<void()> task) {
  if (on_host()) {
    task();
    return;
  }
  watch([this, done = shard_.stream().record(), task = std::move(task)] {
    wait(done);
    task();
  });
}

void BucketPipeline::watch(std::function<void()> task) {
  watcher_.run([this, task = std::move(task)] { guarded(kNeverDropped, task); });
}

void BucketPipeline::run_now(Scope scope, const std::function<void(Stream&)>& task) {
  std::exception_ptr error;
  const auto run_it = [&] {
    try {
      Stream stream = shard_.stream();
      task(stream);
    } catch (...) {
      error = std::current_exception();
    }
  };
  if (on_host()) {
    run_it();
  } else if (scope == Scope::kAllRanks) {
    run_ordered(IssueOrder::kAfterBuckets, kNeverDropped, run_it);
  } else {
    shard_.host.run(run_it);
  }
  if (!on_host()) shard_.host.synchronize();
  if (!error) return;
  if (scope == Scope::kAllRanks) setting_.outcome.fail(error);  // the others are in its collective
  std::rethrow_exception(error);
}

void BucketPipeline::wait_launched() {
  replica_.host.synchronize();
  shard_.host.synchronize();
}

void BucketPipeline::wait_ended() {
  watcher_.synchronize();  // may still launch something
  wait_launched();
  watcher_.synchronize();
}

Event BucketPipeline::done() {
  Stream stream = shard_.stream();
  stream.wait(replica_.stream().record());
  return stream.record();
}

void BucketPipeline::wait_idle() {
  wait_ended();
  wait_done();
  in_flight_.reap();
}

void BucketPipeline::hold(std::shared_ptr<const void> memory) {
  if (!on_host()) in_flight_.hold(shard_.stream().record(), std::move(memory));
}

}  // namespace hsdp::reducer
