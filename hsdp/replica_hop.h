// What the replica all-reduce does to one bucket's shard. PlainHop is the default; quant::LocoHop
// is another implementation. A hop belongs to one Reducer.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "hsdp/bucket_layout.h"
#include "hsdp/comm/communicator.h"
#include "hsdp/device/stream.h"
#include "hsdp/divide_factors.h"

namespace hsdp {

struct ReplicaShard {
  TensorView
      data;  // fp32; in: the undivided shard-group sum; out: the total over replicas / divisor
  HopArithmetic arithmetic;
  int bucket = 0;
  std::span<const ParameterRange> parameters;
  std::atomic<std::uint32_t>* nonfinite = nullptr;
  Reduction reduction = Reduction::kExact;  // for hops that sum by all_reduce
};

class ReplicaHop {
 public:
  virtual ~ReplicaHop() = default;

  // Sums `shard.data` over `replicas` and divides, on `stream`. Every replica ends with identical
  // bits. Not called when the group has one rank.
  virtual void reduce(Communicator& replicas, const ReplicaShard& shard, Stream& stream) = 0;

  // The step ended and every rank's status word is in: `clean` says that no rank saw a non-finite
  // value or abandoned it. A hop with state commits or drops the step's new state here.
  virtual void end_step(bool clean) { static_cast<void>(clean); }
  // Whether end_step() has to come before the next step's reduce(). On a GPU that makes the thread
  // which issues the hops wait for it once a step.
  [[nodiscard]] virtual bool has_state() const { return true; }
  // What it sends, where it brings that along: settles the Reducer's replica_dtype.
  [[nodiscard]] virtual std::optional<Dtype> wire() const { return std::nullopt; }

  [[nodiscard]] virtual std::string_view name() const = 0;  // for stats and snapshots
  [[nodiscard]] virtual std::size_t resident_bytes() const { return 0; }
};

// The all-reduce in one wire dtype, summed in fp32; f16 with the exponents of [Note: f16 headroom].
// Has no state.
class PlainHop final : public ReplicaHop {
 public:
  // Without a dtype: the Reducer's replica_dtype.
  explicit PlainHop(std::optional<Dtype> wire = {}) : wire_(wire) {}

  void reduce(Communicator& replicas, const ReplicaShard& shard, Stream& stream) override;
  [[nodiscard]] std::optional<Dtype> wire() const override { return wire_; }
  [[nodiscard]] bool has_state() const override { return false; }
  [[nodiscard]] std::string_view name() const override { return "plain"; }

 private:
  std::optional<Dtype> wire_;
};

}  // namespace hsdp
