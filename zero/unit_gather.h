// Gathers parameters of which no rank keeps more than its slice (ZeRO stage 3): those of a unit, a
// layer say, before their use, into memory that the caller frees after it.
//
//   zero::UnitGather gather(reducer, {{.name = "layer 0", .parameters = {...}}, ...});
//   gather.gather(0, {whole arrays of layer 0}, stream.record());   // returns at once
//   gather.gather(1, ..., stream.record());                         // the next, ahead of its use
//   gather.wait(0);
//   ... forward of layer 0; then its arrays may be freed ...
//   stream.wait(gather.begin_update(stream.record()));  // no rank reads slices: they may change
//
// A pass is what lies between two calls of end(). If all ranks ask for the same units in the same
// order as in an earlier pass, each unit is gathered once, and only the first one costs a message.
// But a rank may skip a layer, use it twice or take another order. Then every rank takes part in
// the rounds of the others, with scratch memory, and may have to wait until they are in end().
//
// Source: stage 3 of ZeRO (Rajbhandari et al., 2020), and DeepSpeed's recorded trace of gathers,
// which ranks have to follow [Note: rounds of a unit gather].
//
// Ownership: the stored slices and the Reducer outlive the gather. It does not use arrays between
// the end of a wait() and the next gather() of their unit.
// Threads: one at a time.
// Streams: a round reads this rank's slices, and writes its arrays, after the last `updated` that
// this rank gave. On a GPU wait() makes a stream wait, not the host.
// Collective: construction, over the mesh; begin_update(), over the shard group, on a GPU or with
// the Reducer's verify_every over the mesh. The second gather() of a pass waits until all of these
// ranks have made their first one or are in end(). Ranks may make all other calls in any number and
// order. Errors: UsageError for slices and arrays that do not fit; MismatchError if ranks have
// different units; TimeoutError, which names unit and rank, if a rank makes no call. An error in a
// round ends the world, and every wait throws it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/device/event.h"
#include "hsdp/device/stream.h"
#include "hsdp/reducer.h"
#include "hsdp/tensor_view.h"
#include "zero/gather_stats.h"

namespace hsdp::zero {

struct UnitParameter {
  std::string name{};      // if it is not registered with the Reducer, slices are even
  Dtype dtype{};           // of whole arrays
  std::int64_t count = 0;  // of whole arrays
  TensorView stored{};     // this rank's slice: fp32, to be rounded, or of `dtype`
};

struct ParameterUnit {
  std::string name{};  // for messages
  std::vector<UnitParameter> parameters{};
};

class UnitGather {
 public:
  // Prepares the Reducer. Succeeds on all ranks or on none.
  UnitGather(Reducer& reducer, std::vector<ParameterUnit> units);
  ~UnitGather();  // waits for the rounds under way
  UnitGather(const UnitGather&) = delete;
  UnitGather& operator=(const UnitGather&) = delete;

  // A rank's part of a parameter with that many elements that is not registered.
  [[nodiscard]] static Slice even_slice(std::int64_t count, int shard_size, int shard_rank);

  // If a ParameterGather of kShardSlices completes this rank's slices: `arrivals` returns the
  // Events after which a round may read a unit's slices, also a round in which this rank only takes
  // part. The thread that gives a round calls it. Set it before the first gather.
  void read_after(std::function<std::vector<Event>(int unit)> arrivals);

  // Fills one array per parameter of the unit, in order. Blocks while waits_for_opening().
  Event gather(int unit, std::vector<TensorView> arrays, const Event& updated);
  // True from the first gather of a pass until all ranks have made theirs.
  [[nodiscard]] bool waits_for_opening() const;
  // Whether the record's next unit is that one, so that gathering it needs no message. Check it
  // before gathering a unit that may stay unused: on a GPU, a unit that is not next can force the
  // step to be dropped once this rank has handed over gradients. Blocks while waits_for_opening().
  [[nodiscard]] bool comes_next(int unit);
  // Blocks the host until the last gather of that unit is complete; returns at once before the
  // first.
  void wait(int unit);
  // Makes the stream wait. On a GPU it blocks the host only until this rank has enqueued the
  // gather, for which every rank must have given it.
  void wait(int unit, Stream& reader) const;
  // Takes part in the rounds of other ranks until all are in this call or in begin_update(). Ranks
  // may call it different numbers of times. On a GPU, if ranks may want different units, call it
  // before the end of the microbatch, as other ranks may need units to reach that end.
  Event end(const Event& updated);
  // Call it before this rank's slices change: blocks, as end() does, until all ranks are in this
  // call. The Events of both complete when no rank reads this rank's slices any more, on a GPU
  // later. With verify_every, after every Nth step: MismatchError, before any rank updates, if
  // ranks have gathered other values of a unit in the step's microbatches.
  Event begin_update(const Event& updated);

  [[nodiscard]] GatherStats stats() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp::zero
