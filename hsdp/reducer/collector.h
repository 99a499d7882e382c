// Collects the gradients of one microbatch. Packs each one if its bucket has a slot; otherwise adds
// it to its local sum or keeps a reference. Launches complete buckets in layout order.
//
// arrive() may be called from any thread and never waits [Note: readiness never waits]. Every
// bucket is launched, even one without gradients [Note: every bucket, every time]. On CUDA "packed"
// means enqueued on a stream of PackStreams; events tell the pipeline and the caller when it is
// done. The pipeline's thread calls slot_free(), which packs what was kept for the next bucket. The
// other calls come from one thread at a time.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/comm/issue_order.h"
#include "hsdp/comm/operation_record.h"
#include "hsdp/reducer/bucket_pipeline.h"
#include "hsdp/reducer/gradient_memory.h"
#include "hsdp/reducer/microbatch_plan.h"
#include "hsdp/reducer/outcome.h"
#include "hsdp/reducer/pack_streams.h"
#include "hsdp/reducer/packing.h"

namespace hsdp::reducer {

class Collector {
 public:
  // All of it outlives the Collector.
  struct Setting {
    const ParameterTable& parameters;
    const BucketLayout& layout;
    GradientMemory& memory;
    BucketPipeline& pipeline;
    Outcome& outcome;
    Communicator& world;
    Device device;
    PackOrder order = PackOrder::kAhead;
    bool has_shard_hop = false;
    bool holes = false;                          // a parameter may get no gradient
    std::shared_ptr<IssueOrder::Issuer> issuer;  // on a GPU
    Operations operations{};
  };
  explicit Collector(const Setting& setting);
  ~Collector();
  Collector(const Collector&) = delete;
  Collector& operator=(const Collector&) = delete;

  // Opens a microbatch.
  void begin(std::shared_ptr<const MicrobatchPlan> plan);
  // False if that parameter already has all the gradients it may get. UsageError if it was sent as
  // a hole [Note: recorded turns]. In both cases nothing changes.
  [[nodiscard]] bool arrive(int parameter, StridedView gradient, GradientOwner owner,
                            const ValidAfter& valid);
  void slot_free(int slot, const Event& free);

  // ---- The end of a microbatch
  [[nodiscard]] std::vector<int> missing() const;
  [[nodiscard]] bool any_arrived() const;  // in this microbatch
  // Per group, the largest number of gradients of one parameter in this microbatch; at least 1.
  [[nodiscard]] std::vector<std::int64_t> backward_counts(int group_count) const;
  // Replaces the open microbatch's plan by one with other counts, before anything is packed.
  void set_counts_of(std::shared_ptr<const MicrobatchPlan> plan);
  // Counts parameters without a gradient as zeros, and packs what had to wait for the end: local
  // sums, and gradients that need the words first.
  void fill_holes();
  // Packs what was kept, until `done` is true. Calls `done` with the lock held, after every change
  // and every notify().
  void pack_until(const std::function<bool()>& done);
  [[nodiscard]] bool all_packed() const { return unpacked_ == 0; }  // for `done`
  void notify();
  // Closes the microbatch, and forgets the local sums that were sent.
  void end();
  // Closes the microbatch early: releases what was kept, and waits for packs in flight, as the
  // gradients' memory may be about to go. Returns the buckets that were not launched, in order.
  // Does nothing if no microbatch is open.
  [[nodiscard]] std::vector<int> drop();
  // From begin() to end() or drop().
  [[nodiscard]] bool is_open() const;
  // Forgets local sums.
  void clear_accumulators();

  // ---- Order with other streams
  // Completes when every gradient so far has been read. Throws an error of a pack, which is also a
  // fault of the microbatch or the world's end.
  [[nodiscard]] Event packed();
  // Waits for `packs`, events of record_packs(), and releases the gradients that the GPU reads
  // before them.
  void let_go_of_read(const std::vector<Event>& packs) { packs_.reap_after(packs); }
  [[nodiscard]] std::vector<Event> record_packs();
  // Packs of the next microbatch come after `event`.
  void wait_for(const Event& event);
  // Between microbatches: blocks until the device has packed and added everything so far.
  void wait_idle() { packs_.wait_idle(); }

  // ---- State
  // That parameter's local sum, valid after packed(); none if nothing was added.
  [[nodiscard]] std::optional<TensorView> local_sum(int parameter) const;
  // By parameter, '1' where a gradient came in a microbatch of this step, else '0'.
  [[nodiscard]] std::string present() const;
  [[nodiscard]] bool is_present(int parameter) const;
  [[nodiscard]] std::shared_ptr<IssueOrder::Issuer> issuer() const { return issuer_; }
  [[nodiscard]] std::int64_t retained_bytes() const;
  [[nodiscard]] std::int64_t peak_retained_bytes() const;
  [[nodiscard]] std::int64_t misaligned_bytes() const;  // that were packed or added

 private:
  struct Kept {
    StridedView gradient;
    GradientOwner owner;
    ValidAfter valid;
    bool hole = false;
    std::int64_t unpacked_pieces = 0;
    std::int64_t bytes = 0;
  };
  struct BucketState {
    int slot = -1;
    Event slot_free;
    int unpacked = 0;
    std::int64_t phase = -1;                  // the issuer's, when the last gradient came
    std::optional<std::int64_t> operation{};  // its pack, if that has begun
    std::vector<int> waiting;                 // parameters that arrived before the slot did
  };
  // Elements of a parameter that lie side by side in a bucket's carry.
  struct CarryRun {
    int bucket = 0;
    std::int64_t flat_offset = 0;
    std::int64_t bucket_offset = 0;
    std::int64_t count = 0;
  };
  // One parameter in one bucket.
  struct Piece {
    int parameter = 0;
    int bucket = 0;
  };

  using Lock = std::unique_lock<std::mutex>;
  using Done = std::function<bool()>;
  // While it lives, pack_until() waits for `done`. Made and destroyed with the lock held.
  class WaiterScope {
   public:
    WaiterScope(const Done*& place, const Done& done) : place_(place) { place_ = &done; }
    ~WaiterScope() { place_ = nullptr; }
    WaiterScope(const WaiterScope&) = delete;
    WaiterScope& operator=(const WaiterScope&) = delete;

   private:
    const Done*& place_;
  };

  [[nodiscard]] const GroupPlan& group_of(int parameter) const;
  // The buckets that carry its elements.
  [[nodiscard]] BucketRun buckets_of(int parameter) const;
  [[nodiscard]] bool accumulates(int parameter) const;

  // ---- A gradient's way
  // From arrive() by add_locally() or accept() to pack(), and once its bucket is complete, by
  // launch_complete() to the pipeline.

  // UsageError while the stream is captured into a CUDA graph. Asks once per launch.
  void require_no_capture(const ValidAfter& valid);
  void require_not_sent(int parameter) const;
  // Adds a fresh gradient to its local sum, without the lock.
  void add_locally(Lock& lock, int parameter, const StridedView& gradient, GradientOwner owner,
                   const ValidAfter& valid);
  void accumulate(int parameter, const Contribution& contribution);
  // Accepts a parameter of which there is only a local sum, or nothing.
  void accept_sum(Lock& lock, int parameter, bool hole);
  void accept(Lock& lock, int parameter);
  void pack_pieces(Lock& lock, int parameter);
  // Adds a gradient that waits for a slot to its local sum, if that gives the same bits.
  void add_what_waits(Lock& lock, int parameter);
  // Counts its bytes as kept by reference.
  void retain(Kept& kept);
  // For a bucket that has all its gradients but no slot: records now the events that its pack waits
  // for, so that it does not wait for later work of those streams.
  void fix_valid(Lock& lock, const BucketState& state);
  void pack(Lock& lock, Piece piece);
  void add_to_carries(int parameter, const Contribution& contribution, bool adds);
  [[nodiscard]] Contribution contribution_of(int parameter, const Kept& kept) const;
  void piece_packed(Lock& lock, Piece piece);
  void launch_complete(Lock& lock);

  // ---- Slots that become free
  void assign_slots();
  void pack_ready(Lock& lock);
  // True when the thread in pack_until() packs while the pipeline's thread reduces.
  [[nodiscard]] bool leaves_packing_to_caller() const;
  void wake_waiter();

  // ---- How a pack runs
  // Runs `pack`, on the host without the lock, as it takes long there. An error is a fault of the
  // open microbatch, or ends the world if this rank has already said that all is well.
  template <typename Pack>
  void run(Lock& lock, const Pack& pack);
  // On a GPU: launches the packs queued at that place, if there are enough or none will follow.
  void launch_packs(Lock& lock, int place, bool nothing_to_come);
  void begin_pack(int bucket);
  void end_pack(BucketState& state, OperationState how);

  // ---- While the thread waits
  void give_first(Lock& lock, const Done& done);
  // Launches the next bucket now: a parameter without a gradient becomes a hole, or a fault.
  void give_next();
  void wait_for_packs_in_flight(Lock& lock);

  const ParameterTable& parameters_;
  const BucketLayout& layout_;
  GradientMemory& memory_;
  BucketPipeline& pipeline_;
  Outcome& outcome_;
  const PackOrder pack_order_;
  const bool has_shard_hop_;
  const bool holes_;
  PackStreams packs_;
  const Operations operations_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const Done* done_ = nullptr;  // what the thread in pack_until() waits for
  bool awaits_quiet_ = false;
  std::mutex repeats_mutex_;  // if threads may add several gradients to one accumulator
  bool open_ = false;
  std::shared_ptr<void> issuer_open_;  // while open_
  std::shared_ptr<const MicrobatchPlan> plan_;
  // By parameter.
  std::vector<std::int64_t> arrived_;  // gradients in this microbatch
  std::vector<std::int64_t> added_;    // how many of those are in the local sum
  std::string present_;                // in this step
  std::vector<char> accepted_;         // it is packed, or will be
  std::vector<char> early_holes_;      // made by give_next()
  std::vector<char> accumulated_;
  std::vector<Kept> kept_;
  std::vector<BucketState> states_;                // by bucket
  std::vector<std::vector<CarryRun>> carry_runs_;  // if a shard group of one cuts its result
  std::vector<int> order_;                         // the buckets of this microbatch
  std::size_t next_slot_ = 0;
  std::size_t next_launch_ = 0;
  std::deque<Piece> ready_;
  // Segments of the buckets that have a slot, [slot].
  std::array<std::vector<BucketSegment>, kStagingSlots> segments_;
  std::shared_ptr<IssueOrder::Issuer> issuer_;     // on a GPU
  std::thread::id last_giver_;                     // the thread that it was told of last
  std::vector<std::pair<int, Event>> free_slots_;  // each with the event after which to pack it
  std::int64_t unpacked_ = 0;
  std::optional<Stream> not_captured_;  // the last one asked since the last launch
  int in_flight_ = 0;                   // packs
  int reducing_ = 0;                    // buckets launched with a slot that is not free yet
  std::int64_t retained_bytes_ = 0;
  std::int64_t peak_retained_bytes_ = 0;
};

}  // namespace hsdp::reducer
