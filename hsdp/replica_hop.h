// What the replica all-reduce does to one bucket's shard. PlainHop is the default; quant::LocoHop
// is another implementation.
//
// A hop has one owner at a time, a Reducer or a replica_hook. Where there is one replica it is not
// used: the owner calls set_unused() and nothing else. Else it calls prepare() and bind() when it
// is set up, then means() and reduce() for every bucket of a step, in one order on all ranks, and
// end_step() [Note: a replica hop].
//
// Threads: reduce() and end_step() run on threads of the owner's, one call at a time; the rest on
// the thread that drives the owner, and bind({}, {}) on the one that destroys it. means() and
// word() may come while a reduce() runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/comm/communicator.h"
#include "hsdp/device/event.h"
#include "hsdp/device/stream.h"
#include "hsdp/divide_factors.h"
#include "hsdp/memory_count.h"
#include "hsdp/row_cut.h"
#include "hsdp/step_party.h"

namespace hsdp {

namespace reducer {
class HopOwner;
}  // namespace reducer

struct HopParameter {
  std::string name{};
  Shape shape{};
  Dtype dtype = Dtype::kF32;  // of its gradients
};

// What the hop will be given. It outlives the hop's use.
struct HopPlan {
  std::vector<HopParameter> parameters{};  // in registration order
  // Of each bucket: where parameters lie in this rank's shard of it; there may be gaps.
  std::vector<std::vector<ParameterRange>> ranges{};
  // Of each bucket: what reduce() may get. Memory that is only taken later has no address yet.
  std::vector<std::vector<TensorView>> data{};
  std::vector<Dtype> wires{};  // of each bucket, where the hop brings none along
  // Of each bucket: how `data` is cut over the replicas, of which each gets its own part of the
  // total. Empty: every replica gets all of it.
  std::vector<RowCut> cuts{};
  int replicate_size = 1;
  Reduction reduction = Reduction::kExact;  // for hops that sum by all_reduce
  Device device{};
  MemoryCount memory{};  // for what the hop keeps: MemoryKind::kReplicaHop
};

// What a hop takes for a plan, and what it sends when each bucket is reduced once.
struct HopNeed {
  std::int64_t staging_bytes = 0;  // MemoryKind::kStaging
  std::int64_t state_bytes = 0;    // MemoryKind::kReplicaHop
  std::int64_t wire_bytes = 0;     // messages, an all-reduce's twice
};

struct HopBucket {
  int bucket = 0;
  // fp32, or f64 of f64 gradients. In: the undivided shard-group sum. Out: the total over the
  // replicas / arithmetic.divisor, or / arithmetic.mean_divisor where means() said so; the same
  // bits on every replica.
  TensorView data{};
  // Where the plan has cuts: the total of this replica's part, in place of `data`, which then holds
  // anything.
  TensorView part{};
  HopArithmetic arithmetic{};
  std::atomic<std::uint32_t>* nonfinite = nullptr;  // set to 1 for a value that is not finite
  // The hop's calls for this bucket may be, too, where reduce() makes them itself: see CallLabel.
  bool planned = false;
};

// A piece of a hop's state, in memory of the hop's.
struct HopState {
  // Names parameter, replica and place, so that ranks may save theirs together; what has no slash
  // is of the hop as a whole, and the same on all ranks. "layer.weight/r0/o128/codes", "steps".
  std::string key{};
  TensorView data{};
};

class ReplicaHop : public StepParty {
 public:
  // Its options, for stats and snapshots; equal on all ranks, one line of at most 127 bytes.
  [[nodiscard]] virtual std::string describe() const = 0;
  [[nodiscard]] std::string owner() const override { return "replica hop " + describe(); }
  // What it sends, where it brings that along: settles the Reducer's replica_dtype.
  [[nodiscard]] virtual std::optional<Dtype> wire() const { return std::nullopt; }
  // Its results are not those of a wire dtype: comparisons report them and do not judge.
  [[nodiscard]] virtual bool quantizes() const { return false; }
  // Layout "flat" puts every cut, between ranks and buckets, at such multiples of the flattened
  // parameter.
  [[nodiscard]] virtual std::int64_t slice_multiple() const { return 1; }
  // Parameters of different classes never share a bucket.
  [[nodiscard]] virtual int bucket_class(const HopParameter& parameter) const {
    static_cast<void>(parameter);
    return 0;
  }

  // Whether it takes a plan with cuts. Where not, such a Reducer refuses it.
  [[nodiscard]] virtual bool scatters() const { return false; }

  // What prepare() and bind() with that plan would take. Local, at any time; the plan's views have
  // no addresses. Nothing, of a hop that does not say.
  [[nodiscard]] virtual HopNeed need(const HopPlan& plan) const {
    static_cast<void>(plan);
    return {};
  }
  // Local; takes memory. A throw is told to the other ranks, and the set-up may be tried again.
  // Comes again between steps when the owner's buckets change, as replica_hook's do where
  // parameters are frozen.
  virtual void prepare(const HopPlan& plan) { static_cast<void>(plan); }
  // Two groups over the replicas, for this hop alone: exchanges on one may run beside those on the
  // other. `gather` is made only where needs_gather_group() says so. Empty ones when the owner lets
  // go: then nothing of the plan or of any bucket may be used any more once it returns, whatever
  // went wrong before. Every step has ended by then.
  virtual void bind(Communicator scatter, Communicator gather) = 0;
  [[nodiscard]] virtual bool needs_gather_group() const { return true; }  // equal on all ranks
  // There is one replica, so nothing is owed to others.
  virtual void set_unused() {}

  // Whether that bucket's outputs in this step are means, each divided by f s as it comes: the
  // Reducer then adds them, where a group is all several times in a step, and divides nothing.
  // Asked once a step, before its first reduce(), with f s, which stands from then on; a
  // UsageError for one that will not do drops the step. Not where this rank drops it before that.
  [[nodiscard]] virtual bool means(int bucket, double mean_divisor) const {
    static_cast<void>(bucket);
    static_cast<void>(mean_divisor);
    return false;
  }
  // Sums over the replicas, in a task of `stream`. The Event completes when bucket.data is final
  // and nothing uses it; the next bucket may be given before. When this rank has dropped the step
  // and the others do not know, data holds anything: the exchange takes place all the same, and
  // nobody uses the result. A throw, or an error of the Event, ends the world; what still runs
  // then, end_step() and bind() wait for.
  virtual Event reduce(const HopBucket& bucket, Stream& stream) = 0;

  // What it keeps from step to step, and to put that back; between steps. load_state() copies, and
  // may come before prepare(): what does not fit is refused in bind() then.
  [[nodiscard]] virtual std::vector<HopState> state() { return {}; }
  virtual void load_state(std::span<const HopState> state) { static_cast<void>(state); }

 private:
  friend class reducer::HopOwner;
  std::atomic_flag owned_;
};

// The all-reduce that sums a bucket as it is, in its arithmetic's wire dtype.
[[nodiscard]] AllReduce plain_sum(const HopBucket& bucket, Reduction reduction);

// The reduce-scatter that sums a bucket as it is where the plan has cuts: rows are rounded as in
// the all-reduce, into memory that the peers read, and the total is not rounded.
//
// Used as a hop is: made in prepare(), bound in bind(), then one bucket at a time, in the order of
// one stream.
class PlainScatter {
 public:
  // `wires`: of each bucket of the plan; none: the bucket never comes. Takes no memory.
  PlainScatter(const HopPlan& plan, std::span<const std::optional<Dtype>> wires);
  // Before bind(): what it takes, and what its calls send.
  [[nodiscard]] HopNeed need() const;
  // Collective: takes the memory that the rows are rounded into.
  void bind(Communicator& replicas);

  [[nodiscard]] const RowCut& cut(int bucket) const {
    return cuts_[static_cast<std::size_t>(bucket)];
  }
  // Rounds the bucket, inside a task of `stream`; then its call.
  void round(const HopBucket& bucket, const Stream& stream) const;
  [[nodiscard]] ReduceScatter call(const HopBucket& bucket) const;

 private:
  [[nodiscard]] ConstTensorView sent(const HopBucket& bucket) const;

  std::vector<RowCut> cuts_;
  Reduction reduction_;
  MemoryCount memory_;
  std::vector<ReduceScatter> to_come_;  // until bind()
  std::int64_t staging_bytes_ = 0;
  SharedMemory staging_;
  MemoryCount::Held held_;
};

// The all-reduce in one wire dtype, summed in fp32; f16 with the exponents of rule 3. With cuts,
// the reduce-scatter. Has no state.
class PlainHop final : public ReplicaHop {
 public:
  // Without a dtype: the Reducer's replica_dtype.
  explicit PlainHop(std::optional<Dtype> wire = {}) : wire_(wire) {}

  [[nodiscard]] std::string describe() const override { return "plain"; }
  [[nodiscard]] std::optional<Dtype> wire() const override { return wire_; }
  [[nodiscard]] bool has_state() const override { return false; }
  [[nodiscard]] bool needs_gather_group() const override { return false; }
  [[nodiscard]] bool scatters() const override { return true; }
  [[nodiscard]] HopNeed need(const HopPlan& plan) const override;
  void prepare(const HopPlan& plan) override;
  void bind(Communicator scatter, Communicator gather) override;
  Event reduce(const HopBucket& bucket, Stream& stream) override;

 private:
  [[nodiscard]] std::vector<std::optional<Dtype>> wires(const HopPlan& plan) const;

  std::optional<Dtype> wire_;
  Reduction reduction_ = Reduction::kExact;
  std::vector<AllReduce> to_come_;       // between prepare() and bind()
  std::optional<PlainScatter> scatter_;  // with cuts
  Communicator replicas_;
};

}  // namespace hsdp
