// Sends packed buckets through the hops: reduce-scatter into the carry on the shard stream, the
// replica hop on the replica stream, in launch order on every rank.
//
// Then ends the step: judges the words, asks for the non-finite bit, tells the hop.
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
#include "hsdp/reducer/step_agreement.h"
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
  // What it works on. What it refers to outlives it.
  struct Setting {
    const BucketLayout& layout;
    GradientMemory& memory;
    Outcome& outcome;
    StepAgreement& agreement;
    Device device;
    Communicator shard_group;
    Communicator replicate_group;
    std::shared_ptr<ReplicaHop> hop;
    std::optional<Dtype> replica_dtype;  // none: the shard hop's
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

  using Plan = std::shared_ptr<const MicrobatchPlan>;
  // `packed`: the bucket's row in that slot, or its carry, is complete.
  void launch(int number, int slot, const Plan& plan, const Event& packed);
  // What this rank still owes its peers of a bucket when it has dropped the step: the same hops, on
  // zeros. After `packed`, when nobody packs any more.
  void launch_zeros(int number, const Plan& plan, const Event& packed);

  // How a microbatch, finish or discard ends on every rank, after its buckets.
  struct Ending {
    std::int64_t word = 0;  // of the StepAgreement
    std::int64_t step = 0;
    bool ends_step = false;
    bool discards_step = false;
    std::shared_ptr<StepResult> result;
    std::optional<StepAgreement::Words> words{};  // where they are known already
  };
  void end(const Ending& ending);
  // The end of a step that this rank dropped while it sent nothing: a thread of its own finds out
  // from the words what the others send, and sends zeros for that.
  void end_drop(const Ending& ending);

  // Orders later buckets after the replica hops launched so far, and the shard stream's next task.
  void join_streams();
  // kAllRanks: every rank runs this task at this place among the collectives.
  enum class Scope : std::uint8_t { kThisRank, kAllRanks };
  // Runs `task` now, after everything launched, and lets its error out. The device's part of it is
  // enqueued on the stream that it gets.
  void run_now(Scope scope, const std::function<void(Stream&)>& task);

  // Block until the host's part of everything launched is done; wait_ended(): and of the ends of
  // steps, for which a device has to be done.
  void wait_launched();
  void wait_ended();
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
  struct Launch {
    int bucket = 0;
    int slot = kNoSlot;
    Plan plan;
    Event packed;
    BucketArithmetic arithmetic{};
    bool zeros = false;
  };
  void launch(const Launch& launch);
  void zero_slot(const Launch& launch);
  void reduce_scatter(const Launch& launch);
  void complete(const Launch& launch);
  void run_replica_hop(const Launch& launch);
  void run_rest(const Launch& launch);
  void run_end(const Ending& ending);
  void settle(const Ending& ending);
  void send_zeros(const StatusWord& sent, std::int64_t step);
  // Runs `task` once the device has done what was enqueued so far. On a GPU that is on the watcher,
  // and nobody waits; on the host it is now. Not skipped when the step is dropped meanwhile: peers
  // may count on it.
  void run_when_done(std::function<void()> task);
  void watch(std::function<void()> task);
  [[nodiscard]] std::int64_t sent_bytes(std::int64_t count, Dtype wire) const;
  void guarded(std::int64_t step, const std::function<void()>& task);
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
  void run_ordered(int place, std::int64_t step, std::function<void()> task, bool may_drop = false);
  void send_to_shard_hop(const Launch& launch);
  void send_to_replica_hop(const Launch& launch);
  void send_delayed();
  void wait(const Event& event) { setting_.shard_group.wait(event); }
  [[nodiscard]] Lane make_lane(const char* name) const;
  [[nodiscard]] Lane make_second_lane() const;
  [[nodiscard]] bool on_host() const { return setting_.device.type == DeviceType::kHost; }

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
  Stream watcher_;        // waits for a GPU and for the words of a drop, so that no task has to
  Flag zeros_nonfinite_;  // of the hops on zeros
  InFlight in_flight_;
};

}  // namespace hsdp::reducer
