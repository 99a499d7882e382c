// What the replica all-reduce does to one bucket's shard. PlainHop is the default; quant::LocoHop
// is another implementation.
//
// A hop has one owner at a time, a Reducer or a replica_hook. With one replica the owner only calls
// set_unused(). Otherwise it calls prepare() and bind() when it is set up, then means() and
// reduce() for every bucket of a step, in one order on all ranks, and end_step() [Note: a replica
// hop].
//
// Threads: threads of the owner call reduce() and end_step(), one call at a time; the thread that
// drives the owner makes all other calls, and the one that destroys it calls bind({}, {}). means()
// and word() may come during a reduce().
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

// What the hop will get. The plan outlives the hop's use.
struct HopPlan {
  std::vector<HopParameter> parameters{};  // in registration order
  // By bucket: where parameters lie in this rank's shard of it; there may be gaps.
  std::vector<std::vector<ParameterRange>> ranges{};
  // By bucket: the arrays that reduce() may get. Those allocated later have no address yet.
  std::vector<std::vector<TensorView>> data{};
  std::vector<Dtype> wires{};  // by bucket, if the hop has no wire()
  // By bucket: the cut of `data` over the replicas, if each gets only its part of the total. Empty:
  // every replica gets the whole total.
  std::vector<RowCut> cuts{};
  int replicate_size = 1;
  Reduction reduction = Reduction::kExact;  // for hops that sum by all_reduce
  Device device{};
  MemoryCount memory{};  // for what the hop keeps: MemoryKind::kReplicaHop
};

// What a hop allocates for a plan, and sends when each bucket is reduced once.
struct HopNeed {
  std::int64_t staging_bytes = 0;  // MemoryKind::kStaging
  std::int64_t state_bytes = 0;    // MemoryKind::kReplicaHop
  std::int64_t wire_bytes = 0;     // messages; an all-reduce counts twice
};

struct HopBucket {
  int bucket = 0;
  // fp32, or f64 for f64 gradients. In: the undivided shard-group sum. Out: the total over the
  // replicas / arithmetic.divisor, or / arithmetic.mean_divisor if means() was true; the same bits
  // on every replica.
  TensorView data{};
  // If the plan has cuts: receives the total of this replica's part. `data` is then undefined.
  TensorView part{};
  HopArithmetic arithmetic{};
  std::atomic<std::uint32_t>* nonfinite = nullptr;  // set to 1 for a value that is not finite
  // Whether calls that reduce() makes itself for this bucket may be planned: see CallLabel.
  bool planned = false;
};

// A piece of a hop's state, in memory of the hop.
struct HopState {
  // Names parameter, replica and place, so that ranks can save their states together:
  // "layer.weight/r0/o128/codes". A key without a slash is for the whole hop, and the same on all
  // ranks: "steps".
  std::string key{};
  TensorView data{};
};

class ReplicaHop : public StepParty {
 public:
  // Its options, for stats and snapshots; equal on all ranks, one line of at most 127 bytes.
  [[nodiscard]] virtual std::string describe() const = 0;
  [[nodiscard]] std::string owner() const override { return "replica hop " + describe(); }
  // The dtype it sends, which becomes the Reducer's replica_dtype; none: the Reducer decides.
  [[nodiscard]] virtual std::optional<Dtype> wire() const { return std::nullopt; }
  // Whether its results are not those of a wire dtype: comparisons then report without judging.
  [[nodiscard]] virtual bool quantizes() const { return false; }
  // Layout "flat" places every cut, between ranks and buckets, at multiples of it in the flattened
  // parameter.
  [[nodiscard]] virtual std::int64_t slice_multiple() const { return 1; }
  // Parameters of different classes never share a bucket.
  [[nodiscard]] virtual int bucket_class(const HopParameter& parameter) const {
    static_cast<void>(parameter);
    return 0;
  }

  // Whether it accepts a plan with cuts. If not, a Reducer with shard_over = kMesh refuses the hop.
  [[nodiscard]] virtual bool scatters() const { return false; }

  // What prepare() and bind() with that plan would allocate. Local, at any time; the plan's views
  // have no addresses. Default: unknown, so nothing.
  [[nodiscard]] virtual HopNeed need(const HopPlan& plan) const {
    static_cast<void>(plan);
    return {};
  }
  // Local; allocates memory. The other ranks learn of a throw, and the set-up can be tried again.
  // Called again between steps when the owner's buckets change, as those of replica_hook do when
  // parameters are frozen.
  virtual void prepare(const HopPlan& plan) { static_cast<void>(plan); }
  // Gives the hop two groups over the replicas, for it alone: exchanges on one may run beside those
  // on the other. `gather` is empty unless needs_gather_group(). Both are empty when the owner lets
  // go: every step has ended then, and once it returns, the hop must not use the plan or a bucket,
  // even after errors.
  virtual void bind(Communicator scatter, Communicator gather) = 0;
  [[nodiscard]] virtual bool needs_gather_group() const { return true; }  // equal on all ranks
  // Called if there is only one replica.
  virtual void set_unused() {}

  // Whether that bucket's outputs in this step are means, each divided by f s: the Reducer then
  // only adds them, if a group has sync = all several times in a step. Called once a step, before
  // its first reduce(), with f s, which is fixed from then on. Throws a UsageError for an
  // impossible f s, which drops the step. Not called if this rank drops the step before that.
  [[nodiscard]] virtual bool means(int bucket, double mean_divisor) const {
    static_cast<void>(bucket);
    static_cast<void>(mean_divisor);
    return false;
  }
  // Sums over the replicas, in a task of `stream`. The Event completes when bucket.data is final
  // and no longer used; the next bucket may come before. If this rank has dropped the step and the
  // others do not know it yet, `data` is undefined: the exchange still takes place, and its result
  // is not used. A throw, or an error of the Event, ends the world; end_step() and bind() wait for
  // work that still runs.
  virtual Event reduce(const HopBucket& bucket, Stream& stream) = 0;

  // What it keeps from step to step. Between steps. load_state() copies, and may come before
  // prepare(); bind() then refuses a state that does not fit.
  [[nodiscard]] virtual std::vector<HopState> state() { return {}; }
  virtual void load_state(std::span<const HopState> state) { static_cast<void>(state); }

 private:
  friend class reducer::HopOwner;
  std::atomic_flag owned_;
};

// The all-reduce that sums a bucket as it is, in its arithmetic's wire dtype.
[[nodiscard]] AllReduce plain_sum(const HopBucket& bucket, Reduction reduction);

// The reduce-scatter that sums a bucket as it is if the plan has cuts. Rows are rounded as in the
// all-reduce, into memory that the peers read; the total is not rounded.
//
// A hop makes it in prepare(), binds it in bind(), then reduces one bucket at a time, in the order
// of one stream.
class PlainScatter {
 public:
  // `wires`: by bucket of the plan; none: the bucket is never reduced. Allocates nothing.
  PlainScatter(const HopPlan& plan, std::span<const std::optional<Dtype>> wires);
  // Before bind(): what it will allocate, and what its calls will send.
  [[nodiscard]] HopNeed need() const;
  // Collective: allocates the memory for the rounded rows.
  void bind(Communicator& replicas);

  [[nodiscard]] const RowCut& cut(int bucket) const {
    return cuts_[static_cast<std::size_t>(bucket)];
  }
  // Rounds the bucket inside a task of `stream`; call() follows.
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
