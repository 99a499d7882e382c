// What the library's own parts ask of a Reducer beyond what users do: optimizers, gathers and
// windows in zero/, and the bindings. Not installed.
//
//   ReducerInternal(reducer).together("make the optimizer", [&] { ... });
//
// It refers to the Reducer, and has its rules for threads and errors.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/gather_lane.h"
#include "hsdp/memory_count.h"
#include "hsdp/reducer.h"

namespace hsdp {

class Operations;

class ReducerInternal {
 public:
  explicit ReducerInternal(const Reducer& reducer) : parts_(*reducer.parts_) {}

  // Set-up: before the first microbatch, the same on every rank.
  // The units of all registered parameters, in their order.
  void set_units(std::span<const int> units) const;
  // As the option shard_over.
  void set_shard_over(ShardOver over) const;
  // Collective: runs a part of a set-up that rests on the Reducer. Where it throws on one rank, the
  // others get a StepAbortedError, "rank 1 could not <what>: ...".
  void together(std::string_view what, const std::function<void()>& part) const;
  // Collective, between microbatches. Makes a lane for collectives of the shard group that run
  // during later microbatches. `name`: of its thread, the same on every rank. Runs `prepare` first;
  // its lines must be the same on all ranks. Succeeds on all ranks or on none, and may be tried
  // again.
  using LanePreparation = std::function<std::vector<std::string>()>;
  [[nodiscard]] std::unique_ptr<GatherLane> make_lane(const std::string& name,
                                                      const LanePreparation& prepare = {}) const;
  // For the memory of what works on the Reducer's slices; stats() reports it.
  [[nodiscard]] MemoryCount memory_count() const;
  [[nodiscard]] reducer::Groups& groups() const;
  // Blocks until what this rank has launched is done. Throws the world's failure.
  void wait_idle() const;
  // UsageError within a microbatch or a window. A closed Reducer is idle.
  void require_idle(std::string_view call) const;
  // Records the operations of parts that work on the slices; stats() has their times.
  [[nodiscard]] const Operations& operations() const;

  // Whether a gradient of that parameter (an index from register_parameter) was handed over in the
  // step that is begun and not ended. UsageError for an index that was not returned.
  [[nodiscard]] bool has_gradient(int parameter) const;

  // Windows over several Reducers, as zero::CoalescedWindow holds them.
  // Throws what end_window would throw for this rank's mistakes. Call it for every Reducer before
  // ending the first one's window.
  void check_window() const;
  // Leaves a window without its end: drops its step, unless that was dropped inside of it. From
  // such a drop on every call is refused until the window is left, by this or by end_window, which
  // throws.
  void leave_window(std::string_view reason) const noexcept;
  // Waits until all ranks agree on what this one has done, and takes the StepAbortedError that the
  // next call would throw; none when no other rank has dropped the step.
  [[nodiscard]] std::optional<StepAbortedError> take_drop() const;

  // Number of parts of a shard rank's slices: the number of replicas if results are sharded over
  // the mesh, else 1. In layout() the parts of a shard rank are adjacent.
  [[nodiscard]] int slice_parts() const;
  // All of this shard rank's slice, with the parts of the other replicas.
  [[nodiscard]] Slice shard_slice(std::string_view name) const;
  [[nodiscard]] std::int64_t verify_every() const;  // of the options

 private:
  Reducer::Parts& parts_;
};

}  // namespace hsdp
