// Gathers parameters after each rank has updated its slice: over the shard group, or over the mesh
// if the Reducer's results are sharded over it. Gathers run on a separate lane while the caller
// goes on; a reader waits for the parameter that it reads.
//
//   zero::ParameterGather gather(reducer, {{.name = "w", .array = whole}});   // on every rank
//   for (...) {
//     ... a step ...
//     gather.fence(stream);                        // after the last gathers
//     update(reducer.shard("w"), slice of whole);
//     gather.start_all(stream.record());           // returns at once
//     gather.wait("w");                            // before the first use
//   }
//
// Parameters are gathered in units: a large one by itself, straight into its memory; smaller ones
// together, up to `unit_bytes`. Parameters that the Reducer has joined in one bucket stay in one
// unit, so small units need small buckets. A parameter may have a master: this rank's slice in
// fp32, which the gather rounds into the array.
//
// Source: the overlapped parameter gather of Megatron-LM's distributed optimizer, where forward
// hooks also dispatch the gathers; here they only wait [Note: gathers beside backwards].
//
// Ownership: the arrays, the masters and the Reducer outlive the gather. Arrays and masters must
// not be read before ready(), nor written between start() and the end of the unit's gather
// (fence()).
// Threads: start() and fence() from one thread at a time; ready() and wait() from any thread.
// Streams: a unit is read after `updated`. On a GPU a stream that waits is ordered after the work.
// Collective: construction, over the mesh; start() and start_all(), in the same order on every rank
// of the shard group, and of the mesh on a GPU or if results are sharded over it. Everything else
// is local: ranks wait in any order, as often as they like.
// Errors: UsageError for arrays that do not fit and for unknown numbers; MismatchError if ranks
// give different parameters. An error in a gather ends the world, and every wait throws it.
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
  kParameters,  // whole parameters
  // This shard rank's slices, if results are sharded over the mesh: each replica has updated its
  // part, and only the replicas gather. Masters are of that part.
  kShardSlices,
};

// When a gather ran, in seconds of the steady clock; on a GPU, when it was enqueued.
struct GatherTime {
  double begin_s = 0;
  double end_s = 0;
};

class ParameterGather {
 public:
  static constexpr std::int64_t kUnitBytes = std::int64_t{4} << 20;

  // Prepares the Reducer. Succeeds on all ranks or on none.
  ParameterGather(Reducer& reducer, std::vector<GatheredParameter> parameters,
                  std::int64_t unit_bytes = kUnitBytes,
                  Completes completes = Completes::kParameters);
  ~ParameterGather();  // waits for the gathers under way
  ParameterGather(const ParameterGather&) = delete;
  ParameterGather& operator=(const ParameterGather&) = delete;

  [[nodiscard]] int unit_count() const;
  // The parameters of that unit, as indices into those given at construction.
  [[nodiscard]] const std::vector<int>& unit(int number) const;

  // Gathers that unit after `updated`, when this rank's slices are new. Returns at once; on a
  // GPU it waits until the work of `updated` is enqueued. Compares its collectives with those of
  // the peers.
  Event start(int unit, const Event& updated);
  // Gathers all units in their order. Compares the collectives only the first time.
  void start_all(const Event& updated);

  // Completes when the parameter has its new values, and no peer reads this rank's slice of its
  // unit.
  [[nodiscard]] Event ready(int parameter) const;
  [[nodiscard]] int find(std::string_view name) const;  // UsageError for an unknown name
  // Blocks the host until the parameter is ready; returns at once before the first start.
  void wait(int parameter);
  void wait(std::string_view name) { wait(find(name)); }
  void wait_all();
  // Makes the stream wait. On a GPU it blocks the host only until this rank has enqueued the
  // gather, for which every rank must have given it.
  void wait(int parameter, Stream& reader) const;
  // Replaces the parameter's array from the next start on, by one of the same count, dtype and
  // device. Only while no gather is under way.
  void rebind(int parameter, TensorView array);
  // Makes `writer` wait for every gather; call it before updates.
  void fence(Stream& writer) const;

  [[nodiscard]] GatherStats stats() const;
  [[nodiscard]] std::vector<GatherTime> last_times() const;  // by unit; 0 before the first

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp::zero
