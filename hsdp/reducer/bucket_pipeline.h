// Sends packed buckets through the hops: reduce-scatter into the carry on the shard stream, the
// replica hop on the replica stream, in launch order on every rank.
//
// launch() and the other enqueueing calls never block. Errors of tasks go to the Outcome; tasks of
// a dropped or failed step do nothing but free their staging slot.
// [Note: hops on a GPU]: there one thread runs all tasks, and they enqueue on two device streams.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "hsdp/bucket_layout.h"
#include "hsdp/comm/communicator.h"
#include "hsdp/comm/issue_order.h"
#include "hsdp/device/flag.h"
#include "hsdp/device/in_flight.h"
#include "hsdp/reducer/gradient_memory.h"
#include "hsdp/reducer/microbatch_plan.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/replica_hop.h"

namespace hsdp::reducer {

class Collector;

struct HopCounts {
  std::atomic<std::int64_t> reduce_scatter_count{0};
  std::atomic<std::int64_t> all_reduce_count{0};
  std::atomic<std::int64_t> shard_hop_bytes{0};
  std::atomic<std::int64_t> replica_hop_bytes{0};
};

class BucketPipeline {
 public:
  // What it works on. Layout, memory and outcome outlive it.
  struct Setting {
    const BucketLayout& layout;
    GradientMemory& memory;
    Outcome& outcome;
    Device device;
    Communicator shard_group;
    Communicator replicate_group;
    std::shared_ptr<ReplicaHop> hop;
    Reduction reduction = Reduction::kExact;
    // Issues the hops on a GPU, in one order for all Reducers of the mesh.
    std::shared_ptr<IssueOrder::Lane> issuer;
  };
  explicit BucketPipeline(Setting setting);
  // Who packs the slots; outlives the tasks.
  void set_collector(Collector& collector) { collector_ = &collector; }
  ~BucketPipeline() { drain(); }
  BucketPipeline(const BucketPipeline&) = delete;
  BucketPipeline& operator=(const BucketPipeline&) = delete;

  struct Launch {
    int bucket = 0;
    int slot = kNoSlot;
    std::shared_ptr<const MicrobatchPlan> plan;
    Event packed;  // the bucket's row, or carry, is complete
  };
  void launch(const Launch& launch);

  // Orders later buckets after the replica hops launched so far, and the shard stream's next task.
  void join_streams();
  // kAllRanks: every rank runs this task at this place among the collectives.
  enum class Scope : std::uint8_t { kThisRank, kAllRanks };
  // Runs on the shard stream after everything launched so far; skipped as launches are. On all
  // ranks it may drop the step.
  void run_after(Scope scope, std::int64_t epoch, std::function<void()> task);
  // From a task of run_after(): runs `task` once the device has done what was enqueued so far. On a
  // GPU that is on a thread of its own, and nobody waits; on the host it is now. Not skipped when
  // the step is dropped meanwhile: peers may count on it.
  void run_when_done(std::function<void()> task);
  // Runs `task` now, after everything launched, and lets its error out. The device's part of it is
  // enqueued on the stream that it gets.
  void run_now(Scope scope, const std::function<void(Stream&)>& task);

  // Block until the host's part of everything launched is done; wait_watched(): and of what
  // run_when_done() was given, for which the device has to be done.
  void wait_launched();
  void wait_watched();
  // The last part alone; from a task.
  void wait_watcher();
  // After wait_launched(): completes when the device's part is done, too.
  [[nodiscard]] Event done();
  // Blocks until then; throws the world's failure when that comes first.
  void wait_done() { wait(done()); }
  // Blocks until everything is done.
  void wait_idle();
  // Everything is over when it returns, also on the device, whatever went wrong.
  void drain() noexcept;
  // Keeps `memory` until the device has done what was enqueued so far; from a task.
  void hold(std::shared_ptr<const void> memory);

  [[nodiscard]] const HopCounts& counts() const { return counts_; }

 private:
  void reduce_scatter(const Launch& launch);
  void complete(const Launch& launch);
  void run_replica_hop(const Launch& launch, const HopArithmetic& arithmetic);
  void run_rest(const Launch& launch, const BucketArithmetic& arithmetic);
  [[nodiscard]] std::int64_t sent_bytes(std::int64_t count, Dtype wire) const;
  void guarded(std::int64_t epoch, const std::function<void()>& task);
  [[nodiscard]] const Bucket& bucket(int number) const {
    return setting_.layout.buckets()[static_cast<std::size_t>(number)];
  }

  // Tasks run on `host` in order and hand work to `device`. On the host the two are one: `device`
  // is inline, whatever the thread.
  struct Lane {
    Stream host;
    Stream device;
    [[nodiscard]] Stream stream() const { return device.inside_task(); }
  };
  // A task that every rank runs at this place among the collectives. `may_drop`: it may drop the
  // step, and with it tasks that come later.
  void run_ordered(int place, std::int64_t epoch, std::function<void()> task,
                   bool may_drop = false);
  void send_to_shard_hop(const Launch& launch);
  void send_to_replica_hop(const Launch& launch);
  void send_delayed();
  void wait(const Event& event) { setting_.shard_group.wait(event); }
  [[nodiscard]] Lane make_lane(const char* name) const;
  [[nodiscard]] Lane make_second_lane() const;
  [[nodiscard]] bool on_host() const { return setting_.device.type == DeviceType::kHost; }

  [[nodiscard]] BucketArithmetic arithmetic_of(const Launch& launch) const {
    return launch.plan->arithmetic(bucket(launch.bucket));
  }

  Setting setting_;
  Collector* collector_ = nullptr;
  HopCounts counts_;
  bool has_shard_hop_;
  bool has_replica_hop_;
  Lane shard_;
  Lane replica_;
  // On a GPU: the bucket whose replica hop comes after the next one's shard hop.
  std::mutex delayed_mutex_;
  std::optional<Launch> delayed_;
  std::optional<Stream> watcher_;  // on a GPU: waits for it, so that no task has to
  InFlight in_flight_;
};

}  // namespace hsdp::reducer
