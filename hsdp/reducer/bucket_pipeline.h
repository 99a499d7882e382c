// Sends packed buckets through the hops: reduce-scatter into the carry on the shard stream, the
// replica hop on the replica stream, in launch order on every rank.
//
// Then ends the step: judges the words, asks for the non-finite bit, tells the hop.
//
// launch() and the other enqueueing calls never block. Errors of tasks go to the Outcome; tasks of
// a dropped or failed step do nothing but free their staging slot.
// [Note: hops on a GPU]: there both lanes have one thread, and enqueue on two device streams.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/comm/communicator.h"
#include "hsdp/device/flag.h"
#include "hsdp/device/in_flight.h"
#include "hsdp/reducer/gradient_memory.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/hop_owner.h"
#include "hsdp/reducer/lane.h"
#include "hsdp/reducer/microbatch_plan.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/replica_check.h"
#include "hsdp/reducer/step_agreement.h"
#include "hsdp/replica_hop.h"

namespace hsdp::reducer {

class Collector;

class BucketPipeline {
 public:
  // What it works on. What it refers to outlives it.
  struct Setting {
    const BucketLayout& layout;
    GradientMemory& memory;
    Outcome& outcome;
    StepAgreement& agreement;
    Groups groups;
    std::shared_ptr<ReplicaHop> hop;
    Reduction reduction = Reduction::kExact;
    Missing missing = Missing::kError;
    // Issues the hops on a GPU, in one order for all Reducers of the mesh.
    std::shared_ptr<IssueOrder::Issuer> issuer;
    HopOwner* hop_owner = nullptr;  // where there are several replicas
    ReplicaCheck* check = nullptr;  // null: nothing is compared
  };
  explicit BucketPipeline(Setting setting);
  // Who packs the slots; outlives the tasks.
  void set_collector(Collector& collector) { collector_ = &collector; }
  ~BucketPipeline() { drain(); }
  BucketPipeline(const BucketPipeline&) = delete;
  BucketPipeline& operator=(const BucketPipeline&) = delete;

  using Plan = std::shared_ptr<const MicrobatchPlan>;
  // `packed`: the bucket's row in that slot, or its carry, is complete. `phase`: of the Issuer,
  // when its last gradient came.
  void launch(int number, int slot, const Plan& plan, const Event& packed, std::int64_t phase);
  // What this rank still owes its peers of a bucket when it has dropped the step: the same hops, on
  // zeros. After `packed`, when nobody packs any more.
  void launch_zeros(int number, const Plan& plan, const Event& packed);

  // How a microbatch, finish or discard ends on every rank, after its buckets.
  struct Ending {
    std::int64_t word = 0;  // of the StepAgreement
    Plan plan;
    bool discards_step = false;
    std::optional<Words> words{};  // where they are known already
  };
  void end(const Ending& ending);
  // The end of a step that this rank dropped while it sent nothing: a thread of its own finds out
  // from the words what the others send, and sends zeros for that. The plan says which step it is.
  void end_drop(const Ending& ending);

  // What waits for the next bucket to be launched does so no longer.
  void send_delayed();
  // Orders later buckets after the replica hops launched so far.
  void join_lanes();
  // Lane::run() after everything launched so far: for what reads or changes a result.
  Event run(const Lane::Work& work, std::function<void(Stream&)> task);

  // Block until the host's part of everything launched is done; wait_ended(): and of the ends of
  // steps, for which a device has to be done.
  void wait_launched();
  void wait_ended();
  // After wait_launched(): completes when the device's part is done, too.
  [[nodiscard]] Event done();
  // Blocks until everything is done.
  void wait_idle();
  // Everything is over when it returns, also on the device, whatever went wrong.
  void drain() noexcept;
  // Keeps a GPU's `memory` until it has done what was enqueued so far; from a task.
  void hold(std::shared_ptr<const void> memory);

  [[nodiscard]] std::int64_t replica_hop_count() const { return replica_hop_count_; }
  // Of this rank's own rows, which a GPU sums where they lie.
  [[nodiscard]] std::int64_t misaligned_bytes() const { return misaligned_bytes_; }

 private:
  struct Launch {
    int bucket = 0;
    int slot = kNoSlot;
    Plan plan;
    Event packed;
    BucketArithmetic arithmetic{};
    bool zeros = false;
    std::int64_t phase = -1;
  };
  void launch(const Launch& launch);
  void zero_slot(const Launch& launch);
  void shard_hop(const Launch& launch);
  [[nodiscard]] Event replica_hop(const Launch& launch);
  [[nodiscard]] Operation begin(OperationKind kind, const Launch& launch) const;
  void divide(int bucket, double divisor, const MicrobatchPlan& plan, const Stream& stream);
  void count(const MicrobatchPlan& plan, const Words& words);
  void after_hops(const Launch& launch);
  void finish_hops();
  [[nodiscard]] static OperationPlace word_of(const Ending& ending);
  [[nodiscard]] Words collect(const Ending& ending);
  void run_end(const Ending& ending);
  void settle(const Ending& ending, const std::string& calls);
  void send_zeros(const Words& words, const MicrobatchPlan& dropped);
  // Runs `task` once the device has done what was enqueued so far. On a GPU that is on the watcher,
  // and nobody waits; on the host it is now. Not skipped when the step is dropped meanwhile: peers
  // may count on it.
  void run_when_done(std::function<void()> task);
  void watch(std::function<void()> task);
  void send_to_shard_hop(const Launch& launch);
  void send_to_replica_hop(const Launch& launch);
  void wait(const Event& event) { setting_.groups.world.wait(event); }
  void await(const Event& event) const;  // on the caller's thread
  // Of work that was enqueued the device has the rest.
  [[nodiscard]] OperationState ended() const {
    return on_host() ? OperationState::kDone : OperationState::kIssued;
  }
  [[nodiscard]] std::shared_ptr<Lane> make_lane(const char* name) const;
  // Whether that microbatch ends a step whose result the replicas compare.
  [[nodiscard]] bool checks(const Ending& ending) const {
    return ending.plan->ends_step() && !ending.discards_step && setting_.check != nullptr &&
           setting_.check->is_due(ending.plan->step);
  }
  [[nodiscard]] bool on_host() const { return setting_.groups.on_host(); }

  Setting setting_;
  Collector* collector_ = nullptr;
  std::atomic<std::int64_t> replica_hop_count_{0};
  std::atomic<std::int64_t> misaligned_bytes_{0};
  std::shared_ptr<Lane> shard_lane_;
  std::shared_ptr<Lane> replica_lane_;  // the same where there is one hop only
  // Whose replica hop goes on after its reduce() has returned: the replica lane's tasks add, the
  // microbatch's end takes, after them.
  struct Unfinished {
    Launch launch;
    Event reduced;
    Operation operation;
  };
  std::deque<Unfinished> unfinished_;
  // On a GPU: the microbatch's, to be asked for their errors once the device is done.
  std::vector<Event> late_;
  // On a GPU: the bucket whose replica hop comes after the next one's shard hop.
  std::mutex delayed_mutex_;
  std::optional<Launch> delayed_;
  Stream watcher_;        // waits for a GPU and for the words of a drop, so that no task has to
  Flag zeros_nonfinite_;  // of the hops on zeros
  InFlight in_flight_;
};

}  // namespace hsdp::reducer
