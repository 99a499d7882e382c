// Runs collectives of a shard group beside those of a Reducer, such as gathers of parameters during
// the backward passes of the next step [Note: gathers beside backwards].
//
//   const auto lane = ReducerInternal(reducer).make_lane("gather");  // on every rank
//   Event done = lane->run(updated, [=](Communicator& shard_group, Stream& stream) {
//     shard_group.all_gather(own_slice, whole, stream, cut);
//   });
//
// Every rank gives a lane the same tasks in the same order, and they run in that order. Host: on
// the lane's thread. GPU: when every rank has a task, the mesh's issuing thread runs it; it only
// enqueues, on the lane's device stream.
// Ownership: the lane has its own group and keeps the world open; it may outlive the Reducer. What
// a task uses must outlive the task, the Reducer's layout() for example.
// Threads: run() may be called from any thread, but not from a task of the lane.
// Errors: an error in a task, or of `after`, ends the world with its text, because the peers are in
// that task; the task's Event throws it. A StepAbortedError of `after` only skips the task: the
// step is dropped on all ranks. Once the world has failed no task runs, and every Event throws.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/agreement.h"
#include "hsdp/comm/communicator.h"
#include "hsdp/device/event.h"
#include "hsdp/device/stream.h"

namespace hsdp {

namespace reducer {
class Frozen;
struct Groups;
}  // namespace reducer

class GatherLane {
 public:
  // Waits for its tasks: for their `after` without a limit, for peers up to the mesh's timeout.
  ~GatherLane();
  GatherLane(const GatherLane&) = delete;
  GatherLane& operator=(const GatherLane&) = delete;

  using Task = std::function<void(Communicator& shard_group, Stream& stream)>;
  // Runs `task` after all tasks so far and after `after`, which must complete even when the world
  // fails, as the Events of streams do. Returns at once; on a GPU it waits until the work of
  // `after` is enqueued. The Event is done when the task's collectives are complete on this rank;
  // it may outlive the lane.
  // `unit`: what the task gathers, in the record of operations.
  Event run(const Event& after, Task task, int unit = -1);
  // The groups of its tasks' collectives: the shard group, and the replicas if the Reducer's
  // results are sharded over the mesh.
  [[nodiscard]] reducer::Groups& groups();
  // Within a task: merges what the ranks of the shard group say in that task; on a GPU, what all
  // ranks of the mesh say, as their lanes are issued in one order.
  [[nodiscard]] comm::Agreement agree(const comm::Saying& mine, std::string_view act);
  // On a GPU: a thread that gives tasks to this lane calls `give` while it waits for another lane,
  // if this lane's next task must come first on all ranks [Note: recorded turns]; `give` gives that
  // task if it can. So this rank may give tasks that other ranks do not know of, before the
  // Reducer's first bucket of a microbatch. Set it on every rank, before the first task.
  void on_need(std::function<void()> give);
  // Later tasks will not repeat the order of earlier ones.
  void stop_repeating();
  // Blocks until an Event of run() is complete. Throws what went wrong, and the world's failure
  // even if a GPU has done the task, as its input may be incomplete.
  void wait(const Event& done);

 private:
  friend class ReducerInternal;
  struct Parts;
  // Collective over the world: succeeds on all ranks or on none. `lines` must be the same on all
  // ranks. `reducer`: the threads that give the lane tasks also give it gradients; null before the
  // Reducer is prepared.
  GatherLane(reducer::Groups& groups, const std::string& name,
             const std::vector<std::string>& lines, const reducer::Frozen* reducer);

  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp
