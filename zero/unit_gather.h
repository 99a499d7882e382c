// Parameters of which no rank keeps more than its slice (ZeRO stage 3): those of a unit, a layer
// say, are gathered before they are used, into memory that the caller gives back after.
//
//   zero::UnitGather gather(reducer, {{.name = "layer 0", .parameters = {...}}, ...});
//   gather.gather(0, {whole arrays of layer 0}, stream.record());   // returns at once
//   gather.gather(1, ..., stream.record());                         // the next, ahead of its use
//   gather.wait(0);
//   ... forward of layer 0; then its arrays may be freed ...
//   stream.wait(gather.begin_update(stream.record()));  // nobody needs slices: they may change
//
// Ranks that ask for the same units in the same order as in a pass before gather each unit once,
// and only the first one costs a message; a pass is what comes between two calls of end(). Yet they
// need not: a rank may skip a layer, use it twice or go another way. Then the others take part
// in what it wants, and it in what they want, with scratch memory; it may have to wait until they
// are in end(), which brings all in step again.
//
// Source: stage 3 of ZeRO (Rajbhandari et al., 2020), and DeepSpeed's recorded trace of gathers,
// which ranks have to follow [Note: rounds of a unit gather].
//
// Ownership: stored slices outlive the gather, as does the Reducer; arrays are not touched between
// the end of one wait() and the next gather() of their unit.
// Threads: one at a time. Streams: a round reads this rank's slices, and writes its arrays, after
// the last `updated` that this rank gave. On a GPU wait() lets a stream wait, not the host.
// Collective: construction, over the mesh; begin_update(), over the shard group, on a GPU over the
// mesh. The second gather() of a pass waits until all of those have made their first one, or are in
// end().
// Errors: UsageError for slices and arrays that do not fit; MismatchError where ranks have other
// units. A rank that makes no call is a TimeoutError that names unit and rank. What goes wrong in a
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
  std::string name{};      // registered with the Reducer, or not: then the slices are even
  Dtype dtype{};           // of whole arrays
  std::int64_t count = 0;  // of whole arrays
  TensorView stored{};     // this rank's slice: fp32, which is rounded on the way, or of `dtype`
};

struct ParameterUnit {
  std::string name{};  // for messages
  std::vector<UnitParameter> parameters{};
};

class UnitGather {
 public:
  // Prepares the Reducer. All ranks have the gather in the end or none.
  UnitGather(Reducer& reducer, std::vector<ParameterUnit> units);
  ~UnitGather();  // waits for the rounds under way
  UnitGather(const UnitGather&) = delete;
  UnitGather& operator=(const UnitGather&) = delete;

  // This rank's part of a parameter of so many elements that is not registered.
  [[nodiscard]] static Slice even_slice(std::int64_t count, int shard_size, int shard_rank);

  // Where others complete this rank's slices, as a ParameterGather of kShardSlices does: `arrivals`
  // gives the Events after which a unit's slices may be read, by any round, also one in which this
  // rank only takes part. Called by whoever gives a round. Before the first gather.
  void read_after(std::function<std::vector<Event>(int unit)> arrivals);

  // Fills one array per parameter of the unit, in their order. Blocks while waits_for_opening().
  Event gather(int unit, std::vector<TensorView> arrays, const Event& updated);
  // True between the first gather of a pass and the time when all ranks have made theirs.
  [[nodiscard]] bool waits_for_opening() const;
  // Whether gathering that unit now skips none that the ranks gather without asking, and asks them
  // for none. Where it is not sure to be used: on a GPU, the wrong one may cost the step if this
  // rank has given gradients. Blocks while waits_for_opening().
  [[nodiscard]] bool comes_next(int unit);
  // Blocks the host until the last gather of that unit is complete; returns at once before any.
  void wait(int unit);
  // Lets the stream wait, on a GPU for the device's work only.
  void wait(int unit, Stream& reader) const;
  // Takes part in what others ask for, and blocks until none does: all are in this call or in
  // begin_update(). How often a rank calls it is its own affair. On a GPU, where ranks may want
  // different units: before the end of the microbatch, which others may need units to come to.
  Event end(const Event& updated);
  // Before this rank's slices change: blocks, as end() does, until all are in this call. Of either
  // the Event is complete when nobody reads this rank's slices any more, on a GPU later.
  Event begin_update(const Event& updated);

  [[nodiscard]] GatherStats stats() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp::zero
