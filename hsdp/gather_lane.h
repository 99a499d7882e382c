// Runs collectives of a shard group beside a Reducer's own, such as gathers of parameters under the
// backward passes of the next step [Note: gathers beside backwards].
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
  // Waits for its tasks: for as long as their `after` takes, and for peers at most as long as the
  // mesh's timeout.
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
  // What its tasks' collectives run on: the shard group that they are given, and where the
  // Reducer's results are sharded over the mesh, the replicas.
  [[nodiscard]] reducer::Groups& groups();
  // Within a task: what the ranks of the shard group say in that task, merged. On a GPU all ranks
  // of the mesh, whose lanes are issued in one order.
  [[nodiscard]] comm::Agreement agree(const comm::Saying& mine, std::string_view act);
  // On a GPU: `give` is called by a thread that has given this lane tasks while it waits for those
  // of another lane, and the next one of this lane must come first on all ranks [Note: recorded
  // turns]. It gives that one, where it can. This rank may then give tasks that others do not know
  // of, before the Reducer's first bucket of a microbatch. On every rank, before the first task.
  void on_need(std::function<void()> give);
  // What this rank gives from now on is not what it gave before.
  void stop_repeating();
  // Blocks until an Event of run() is complete. Throws what went wrong, also where a GPU did the
  // task and the world failed meanwhile: nobody knows then what has come.
  void wait(const Event& done);

 private:
  friend class ReducerInternal;
  struct Parts;
  // Collective over the world: all ranks have it or none. The lines say what else they agree on.
  // Who gives it tasks gives gradients to the Reducer; null before that is prepared.
  GatherLane(reducer::Groups& groups, const std::string& name,
             const std::vector<std::string>& lines, const reducer::Frozen* reducer);

  std::unique_ptr<Parts> parts_;
};

}  // namespace hsdp
