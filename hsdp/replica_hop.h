// What the replica all-reduce does to one bucket's shard. PlainHop is the default; quant::LocoHop
// is another implementation. A hop belongs to one Reducer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "hsdp/bucket_layout.h"
#include "hsdp/comm/communicator.h"
#include "hsdp/device/stream.h"

namespace hsdp {

struct ReplicaShard {
  TensorView
      data;  // fp32; in: the undivided shard-group sum; out: the total over replicas / divisor
  Dtype wire = Dtype::kF32;
  int bucket = 0;
  int shard_size = 1;
  std::int64_t microbatch_count = 1;  // summed in the data: sizes the f16 headroom
  float divisor = 1.0F;
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

  [[nodiscard]] virtual std::string_view name() const = 0;  // for stats and snapshots
  [[nodiscard]] virtual std::size_t resident_bytes() const { return 0; }
};

// The all-reduce in the wire dtype: sums in fp32, f16 with headroom exponents.
[[nodiscard]] std::shared_ptr<ReplicaHop> plain_hop();

}  // namespace hsdp
