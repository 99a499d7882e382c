// A window of several backward passes that are reduced once, at its end, however many they are.
//
//   {
//     zero::CoalescedWindow window({&reducer});
//     for (const auto& chunk : chunks) {
//       backward(chunk);                       // reducer.gradient_ready(...) for each parameter
//     }
//     window.end();                            // one reduction; the step's result stands
//   }
//
// In a Reducer's state machine it is one microbatch. The ranks need not keep step inside of it, and
// may run different numbers of passes: losses that embed a batch in chunks of a token budget do.
// What the options mean is said by WindowOptions; what last = false leaves pending by
// Reducer::set_partial_sync (kNone: stage 1 of ZeRO; kShard: stages 2 and 3).
// Source: DeepSpeed's coalesce_grad_reduction (deepspeedai/DeepSpeed pull request 7992)
// [Note: windows of backward passes].
//
// Several Reducers (pipeline stages, meshes of experts, two networks that train each other) share a
// window: all of them reduce at its end, in the order given. Where one cannot begin on a rank, or
// this rank has broken its rules, the steps of all are dropped; what another rank has dropped is
// thrown once for all of them.
//
// Ownership: the Reducers outlive the window. Threads: as of Reducer. Collective: construction and
// end(), by every rank of each Reducer's mesh.
// Errors: UsageError for no Reducer, the same one twice, one whose window is open already, and as
// Reducer::begin_window. A window that dies without end() drops the step on all ranks, also without
// an exception: the others get a StepAbortedError that names this rank; all may begin a new step.
#pragma once

#include <cstdint>
#include <vector>

#include "hsdp/reducer.h"

namespace hsdp::zero {

// Waits until the ranks agree on the last steps of these Reducers, which share windows. Throws what
// another rank has dropped, once: not where the drop of one of them is known already.
void hear_drops(const std::vector<Reducer*>& reducers);

class CoalescedWindow {
 public:
  explicit CoalescedWindow(std::vector<Reducer*> reducers, const WindowOptions& options = {});
  ~CoalescedWindow();
  CoalescedWindow(const CoalescedWindow&) = delete;
  CoalescedWindow& operator=(const CoalescedWindow&) = delete;

  // `backwards`: of how many passes each gradient that was handed over is the sum, where the caller
  // has added them up (Accumulate::kGrad).
  void end(std::int64_t backwards = 1);

 private:
  std::vector<Reducer*> open_;  // none after the end
  reducer::ScopeEnd scope_;
};

}  // namespace hsdp::zero
