#include "hsdp/reducer/bucket_pipeline.h"

#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "hsdp/kernels/scale_and_cast.h"
#include "hsdp/kernels/sum_rows.h"
#include "hsdp/reducer/collector.h"

namespace hsdp::reducer {
namespace {

constexpr std::int64_t kNeverDropped = std::numeric_limits<std::int64_t>::max();  // an epoch

}  // namespace

BucketPipeline::BucketPipeline(Setting setting)
    : setting_(std::move(setting)),
      has_shard_hop_(setting_.shard_group.size() > 1),
      has_replica_hop_(setting_.replicate_group.size() > 1),
      shard_(make_lane("hsdp-shard")),
      replica_(make_second_lane()) {
  if (!on_host()) watcher_ = Stream::host_worker("hsdp-watch");
}

void BucketPipeline::drain() noexcept {
  const auto quietly = [](const auto& call) {
    try {
      call();
    } catch (...) {  // was reported when it happened
    }
  };
  send_delayed();
  quietly([this] { replica_.host.synchronize(); });
  quietly([this] { shard_.host.synchronize(); });
  quietly([this] { wait_watcher(); });
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

void BucketPipeline::guarded(std::int64_t epoch, const std::function<void()>& task) {
  if (setting_.outcome.skips(epoch)) return;
  std::exception_ptr error;
  try {
    task();
  } catch (...) {
    error = std::current_exception();
  }
  // Told after the handler, when this thread holds no share of the exception any more.
  if (error) setting_.outcome.fail(std::move(error));
}

void BucketPipeline::run_ordered(int place, std::int64_t epoch, std::function<void()> task,
                                 bool may_drop) {
  if (on_host()) {
    shard_.host.run(std::move(task));
  } else {
    setting_.issuer->run_ordered(
        {.run = std::move(task),
         .place = place,
         .skipped = [this, epoch] { return setting_.outcome.skips(epoch); },
         .may_skip_later = may_drop});
  }
}

void BucketPipeline::launch(const Launch& launch) {
  const bool completes = !arithmetic_of(launch).ends_after_shard_hop();
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
  run_ordered(launch.bucket, launch.plan->epoch, [this, launch] {
    guarded(launch.plan->epoch, [&] {
      shard_.stream().wait(launch.packed);
      reduce_scatter(launch);
    });
    // After a failure a peer may still be reading the slot, and nothing is sent any more.
    if (!setting_.outcome.failed()) collector_->slot_free(launch.slot, shard_.stream().record());
  });
}

void BucketPipeline::send_to_replica_hop(const Launch& launch) {
  const auto complete_bucket = [this, launch] {
    guarded(launch.plan->epoch, [&] {
      Stream stream = replica_.stream();
      stream.wait(launch.packed);
      stream.wait(shard_.stream().record());
      complete(launch);
    });
  };
  if (!on_host()) return run_ordered(launch.bucket, launch.plan->epoch, complete_bucket);
  if (!replica_.host.same_queue(shard_.host)) replica_.host.wait(shard_.host.record());
  replica_.host.run(complete_bucket);
}

void BucketPipeline::reduce_scatter(const Launch& launch) {
  const Bucket& b = bucket(launch.bucket);
  const BucketArithmetic arithmetic = arithmetic_of(launch);
  ReduceScatter args;
  args.in = setting_.memory.staging(launch.slot, b);
  args.out = setting_.memory.carry(b);
  args.cut = b.rows;
  args.accumulate = arithmetic.adds_carry;
  args.sum_exponent = arithmetic.row_exponent;
  args.divisor = arithmetic.shard_divisor;
  args.nonfinite = launch.plan->nonfinite.get();
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
  const BucketArithmetic arithmetic = arithmetic_of(launch);
  if (arithmetic.runs_replica_hop) run_replica_hop(launch, arithmetic.replica);
  run_rest(launch, arithmetic);
}

void BucketPipeline::run_replica_hop(const Launch& launch, const HopArithmetic& arithmetic) {
  ReplicaShard shard;
  shard.data = setting_.memory.carry(bucket(launch.bucket));
  shard.arithmetic = arithmetic;
  shard.bucket = launch.bucket;
  const std::vector<ParameterRange> ranges =
      shard_ranges(setting_.layout, launch.bucket, setting_.shard_group.rank());
  shard.parameters = ranges;
  shard.nonfinite = launch.plan->nonfinite.get();
  shard.reduction = setting_.reduction;
  Stream stream = replica_.stream();
  setting_.hop->reduce(setting_.replicate_group, shard, stream);
  ++counts_.all_reduce_count;
  counts_.replica_hop_bytes += sent_bytes(shard.data.count, arithmetic.wire);
}

void BucketPipeline::run_rest(const Launch& launch, const BucketArithmetic& arithmetic) {
  using Rest = BucketArithmetic::Rest;
  if (arithmetic.rest == Rest::kNothing) return;
  const Bucket& b = bucket(launch.bucket);
  const TensorView carry = setting_.memory.carry(b);
  if (arithmetic.rest == Rest::kDivide) {
    kernels::ScaleAndCast args;
    args.in = args.out = carry.data;
    args.count = carry.count;
    args.divisor = arithmetic.rest_divisor;
    args.nonfinite = launch.plan->nonfinite.get();
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
  args.nonfinite = launch.plan->nonfinite.get();
  kernels::sum_rows(args, replica_.stream());
}

void BucketPipeline::join_streams() {
  send_delayed();
  if (!replica_.host.same_queue(shard_.host)) shard_.host.wait(replica_.host.record());
  if (!on_host()) shard_.host.run([this] { shard_.stream().wait(replica_.stream().record()); });
}

void BucketPipeline::run_after(Scope scope, std::int64_t epoch, std::function<void()> task) {
  auto guarded_task = [this, epoch, task = std::move(task)] { guarded(epoch, task); };
  if (scope == Scope::kThisRank) return shard_.host.run(std::move(guarded_task));
  // After all buckets: of several Reducers the others' buckets come first.
  run_ordered(IssueOrder::kAfterBuckets, epoch, std::move(guarded_task), true);
}

void BucketPipeline::run_when_done(std::function<void()> task) {
  if (on_host()) {
    task();
    return;
  }
  watcher_->run([this, done = shard_.stream().record(), task = std::move(task)] {
    guarded(kNeverDropped, [&] {
      wait(done);
      task();
    });
  });
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

void BucketPipeline::wait_watched() {
  wait_launched();
  wait_watcher();
}

void BucketPipeline::wait_watcher() {
  if (watcher_) watcher_->synchronize();
}

Event BucketPipeline::done() {
  Stream stream = shard_.stream();
  stream.wait(replica_.stream().record());
  return stream.record();
}

void BucketPipeline::wait_idle() {
  wait_watched();
  wait_done();
  in_flight_.reap();
}

void BucketPipeline::hold(std::shared_ptr<const void> memory) {
  if (!on_host()) in_flight_.hold(shard_.stream().record(), std::move(memory));
}

}  // namespace hsdp::reducer
