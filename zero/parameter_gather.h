// Completes parameters of which each rank of a shard group has updated its slice, or each rank of
// the mesh where the Reducer's results are sharded over that, on a lane of its own: gathers run
// under whatever comes next, and readers wait for what they are about to read.
//
//   zero::ParameterGather gather(reducer, {{.name = "w", .array = whole}});   // on every rank
//   for (...) {
//     ... a step ...
//     gather.fence(stream);                        // the last gathers are over
//     update(reducer.shard("w"), slice of whole);
//     gather.start_all(stream.record());           // returns at once
//     gather.wait("w");                            // before the first use
//   }
//
// Parameters are gathered in units: a large one by itself, straight into its memory, smaller ones
// together in a unit of at most `unit_bytes`. What the Reducer has joined to one bucket is
// never divided: small units need small buckets. Units are started in their order, the same on
// every rank; whoever reads only waits, in any order and as often as it likes. A parameter may have
// a master: this rank's slice in fp32, which is rounded into the array on the way.
//
// Source: the overlapped parameter gather of Megatron-LM's distributed optimizer, where forward
// hooks also dispatch the gathers; here they only wait [Note: gathers beside backwards].
//
// Ownership: arrays and masters outlive the gather, as does the Reducer. They must not be read
// before ready(), nor written between start() and the end of the unit's gather (fence()).
// Threads: start() and fence() from one thread at a time; ready() and wait() from any.
// Streams: a unit is read after `updated`. On a GPU wait() lets a stream wait, not the host.
// Collective: construction; starts, in the same order on every rank of the shard group.
// Errors: UsageError for arrays that do not fit and numbers that there are not; MismatchError where
// ranks give other parameters. What goes wrong in a gather ends the world, and every wait throws
// it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/device/event.h"
#include "hsdp/device/stream.h"
#include "hsdp/reducer.h"
#include "hsdp/tensor_view.h"
#include "zero/gather_stats.h"

namespace hsdp::zero {

struct GatheredParameter {
  std::string name{};   // as registered
  TensorView array{};   // the whole parameter, contiguous; any dtype without a master
  TensorView master{};  // this rank's slice: f32 of an array of f32, bf16 or f16, f64 of one of f64
};

// What the arrays of a gather are.
enum class Completes : std::uint8_t {
  kParameters,  // whole ones
  // This shard rank's slices of them, where results are sharded over the mesh: each replica has
  // updated its part, and the shard group is not asked. Masters are of that part.
  kShardSlices,
};

// In seconds of the steady clock. On a GPU: when it was enqueued.
struct GatherTime {
  double begin_s = 0;
  double end_s = 0;
};

class ParameterGather {
 public:
  static constexpr std::int64_t kUnitBytes = std::int64_t{4} << 20;

  // Prepares the Reducer. All ranks have the gather in the end or none.
  ParameterGather(Reducer& reducer, std::vector<GatheredParameter> parameters,
                  std::int64_t unit_bytes = kUnitBytes,
                  Completes completes = Completes::kParameters);
  ~ParameterGather();  // waits for the gathers under way
  ParameterGather(const ParameterGather&) = delete;
  ParameterGather& operator=(const ParameterGather&) = delete;

  [[nodiscard]] int unit_count() const;
  // Which parameters it holds, as indices into those given at construction.
  [[nodiscard]] const std::vector<int>& unit(int number) const;

  // The own slices of that unit are new. Never blocks. Its collectives are compared with the
  // peers'.
  Event start(int unit, const Event& updated);
  // Of all units, in their order, which is known: so these are compared the first time only.
  void start_all(const Event& updated);

  // The new values of that parameter are in, and no peer reads this rank's slice of its unit.
  [[nodiscard]] Event ready(int parameter) const;
  [[nodiscard]] int find(std::string_view name) const;  // UsageError for an unknown one
  // Blocks the host until it is ready; returns at once before the first start.
  void wait(int parameter);
  void wait(std::string_view name) { wait(find(name)); }
  void wait_all();
  // Lets the stream wait, on a GPU for the device's work only.
  void wait(int parameter, Stream& reader) const;
  // From the next start on the parameter is that array, of the same count, dtype and device. Local;
  // no gather is under way then.
  void rebind(int parameter, TensorView array);
  // Before `writer` updates anything: it waits for every gather.
  void fence(Stream& writer) const;

  [[nodiscard]] GatherStats stats() const;
  [[nodiscard]] std::vector<GatherTime> last_times() const;  // by unit; 0 before the first

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp::zero
