// Sends packed buckets through the hops, in launch order on every rank: the shard lane
// reduce-scatters into the carry, the replica lane runs the replica hop. Then ends the step: judges
// the words, asks for the non-finite bit, tells the hop.
//
// Calls that only enqueue never block. Errors of tasks go to the Outcome; tasks of a dropped or
// failed step only free their staging slot. On a GPU one thread serves both lanes and enqueues on
// two device streams [Note: hops on a GPU].
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
  // All that it refers to outlives the pipeline.
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
  // The Collector packs the slots and outlives the tasks.
  void set_collector(Collector& collector) { collector_ = &collector; }
  ~BucketPipeline() { drain(); }
  BucketPipeline(const BucketPipeline&) = delete;
  BucketPipeline& operator=(const BucketPipeline&) = delete;

  using Plan = std::shared_ptr<const MicrobatchPlan>;
  // `packed` completes when the bucket's row in that slot, or its carry, is complete. `phase`: the
  // Issuer's phase() when the bucket's last gradient came.
  void launch(int number, int slot, const Plan& plan, const Event& packed, std::int64_t phase);
  // For a bucket that peers still wait for after this rank dropped the step: runs the same hops on
  // zeros, after `packed`, when no thread packs any more.
  void launch_zeros(int number, const Plan& plan, const Event& packed);

  // What ends a microbatch, finish or discard on every rank, after its buckets.
  struct Ending {
    std::int64_t word = 0;  // its number in the StepAgreement
    Plan plan;
    bool discards_step = false;
    std::optional<Words> words{};  // if they are known already
  };
  void end(const Ending& ending);
  // Ends a step that this rank dropped while it sent nothing: a separate thread learns from the
  // words what the others send, and sends zeros for it. The plan says which step it is.
  void end_drop(const Ending& ending);

  // Sends the bucket that waits for the next launch.
  void send_delayed();
  // Orders later buckets after the replica hops launched so far.
  void join_lanes();
  // Lane::run() after everything launched so far, for tasks that read or change a result.
  Event run(const Lane::Work& work, std::function<void(Stream&)> task);

  // Block until the host's part of everything launched is done. wait_ended() also waits for the
  // ends of steps, and so for the device.
  void wait_launched();
  void wait_ended();
  // After wait_launched(): completes when the device's part is done, too.
  [[nodiscard]] Event done();
  // Blocks until everything is done.
  void wait_idle();
  // Blocks until everything is over, on the device too, even after errors.
  void drain() noexcept;
  // Called by a task: keeps `memory` until the GPU has done what was enqueued so far.
  void hold(std::shared_ptr<const void> memory);

  [[nodiscard]] std::int64_t replica_hop_count() const { return replica_hop_count_; }
  // On a GPU: bytes of this rank's rows that did not lie on 16.
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
  // Runs `task` once the device has done what was enqueued so far: on a GPU on the watcher, on the
  // host at once. Runs it even if the step is dropped meanwhile, as peers may wait for it.
  void run_when_done(std::function<void()> task);
  void watch(std::function<void()> task);
  void send_to_shard_hop(const Launch& launch);
  void send_to_replica_hop(const Launch& launch);
  void wait(const Event& event) { setting_.groups.world.wait(event); }
  void await(const Event& event) const;  // on the caller's thread
  // The state of a hop's operation when its task returns.
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
  std::shared_ptr<Lane> replica_lane_;  // the shard lane if there is only one hop
  // Buckets whose replica hop goes on after reduce() has returned. The replica lane's tasks add
  // them; the microbatch's end takes them.
  struct Unfinished {
    Launch launch;
    Event reduced;
    Operation operation;
  };
  std::deque<Unfinished> unfinished_;
  // On a GPU: the microbatch's events, whose errors are read once the device is done.
  std::vector<Event> late_;
  // On a GPU: the bucket whose replica hop comes after the next one's shard hop.
  std::mutex delayed_mutex_;
  std::optional<Launch> delayed_;
  Stream watcher_;        // waits in place of tasks: for a GPU, and for the words of a drop
  Flag zeros_nonfinite_;  // of the hops on zeros
  InFlight in_flight_;
};

}  // namespace hsdp::reducer
