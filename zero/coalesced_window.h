// A window of any number of backward passes, which are reduced once, at its end.
//
//   {
//     zero::CoalescedWindow window({&reducer});
//     for (const auto& chunk : chunks) {
//       backward(chunk);                       // reducer.gradient_ready(...) for each parameter
//     }
//     window.end();                            // one reduction, which ends the step
//   }
//
// A window is one microbatch of the Reducer. Ranks may run different numbers of passes at different
// times inside it, as with losses that embed a batch in chunks of a token budget. WindowOptions
// says what the options mean, and Reducer::set_partial_sync what last = false leaves pending
// (kNone: stage 1 of ZeRO; kShard: stages 2 and 3).
// Source: DeepSpeed's coalesce_grad_reduction (deepspeedai/DeepSpeed pull request 7992) [Note:
// windows of backward passes].
//
// Several Reducers (pipeline stages, meshes of experts, two networks that train each other) can
// share a window: all reduce at its end, in the given order. If one cannot begin on a rank, or this
// rank misuses one, the steps of all are dropped. A drop by another rank is thrown once for all of
// them.
//
// Ownership: the Reducers outlive the window. Threads: as for Reducer. Collective: construction and
// end(), over the mesh of each Reducer.
// Errors: UsageError for no Reducer, the same one twice, one whose window is open already, and as
// Reducer::begin_window. A window that is destroyed without end(), even without an exception, drops
// the step on all ranks: the others get a StepAbortedError that names this rank; all can begin a
// new step.
#pragma once

#include <cstdint>
#include <vector>

#include "hsdp/reducer.h"

namespace hsdp::zero {

// Waits until the ranks agree on the last steps of these Reducers, which share windows. Throws a
// drop by another rank once, and not if the drop of one of them is known already.
void hear_drops(const std::vector<Reducer*>& reducers);

class CoalescedWindow {
 public:
  explicit CoalescedWindow(std::vector<Reducer*> reducers, const WindowOptions& options = {});
  ~CoalescedWindow();
  CoalescedWindow(const CoalescedWindow&) = delete;
  CoalescedWindow& operator=(const CoalescedWindow&) = delete;

  // `backwards`: the number of passes of which each gradient is the sum, if the caller has added
  // them up (Accumulate::kGrad).
  void end(std::int64_t backwards = 1);

 private:
  std::vector<Reducer*> open_;  // empty after end()
  reducer::ScopeEnd scope_;
};

}  // namespace hsdp::zero
