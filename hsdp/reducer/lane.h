// Issues collectives: a thread that runs tasks in order, and a stream of the device on which they
// enqueue their work.
//
// On the host each lane has a thread, and the stream is inline. On a GPU all lanes of the mesh
// share one thread and take turns in one order on all ranks [Note: hops on a GPU]; two lanes with
// one Issuer keep the order in which they are given tasks. Issuing never blocks. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "hsdp/comm/issue_order.h"
#include "hsdp/device/event.h"
#include "hsdp/device/stream.h"
#include "hsdp/reducer/outcome.h"

namespace hsdp::reducer {

class Lane {
 public:
  // `issuer`: on a GPU. The Outcome outlives the lane.
  Lane(const char* name, Device device, Outcome& outcome,
       std::shared_ptr<IssueOrder::Issuer> issuer);

  // A task that every rank runs at the same place among the collectives, unless its step is
  // dropped.
  struct Task {
    std::function<void()> run;
    std::int64_t step = kNoStep;
    int place = IssueOrder::kAfterBuckets;
    bool may_drop = false;  // it may drop the step, and with it later tasks
    bool ends_step = false;
    std::int64_t phase = -1;  // as in an OrderedTask
  };
  void issue(Task task);
  // Later tasks, and the work they enqueue, come after all tasks of the other lane so far.
  void follow(const Lane& other);

  // On a GPU: the Issuer's calls of these names.
  [[nodiscard]] std::shared_ptr<void> come_late() {
    return issuer_ ? issuer_->come_late() : nullptr;
  }
  void on_need(std::function<void()> give) {
    if (issuer_) issuer_->on_need(std::move(give));
  }
  void give_here() {
    if (issuer_) issuer_->give_here();
  }
  void stop_repeating() {
    if (issuer_) issuer_->stop_repeating();
  }

  // For the running task to enqueue on.
  [[nodiscard]] Stream stream() const { return device_.inside_task(); }

  // kAllRanks: every rank runs the task at the same place among the collectives. Its error ends the
  // world, as the others are in its collective. kThisRank: only the Event throws its error.
  enum class Scope : std::uint8_t { kThisRank, kAllRanks };
  struct Work {
    Scope scope = Scope::kThisRank;
    std::int64_t step = kNoStep;
    Event after;
  };
  // Runs `task` after all tasks so far and after `work.after`, which must always complete, as
  // events of streams do. Returns at once; on a GPU it waits until the work of `after` is enqueued.
  // The returned Event completes when the task and, on a GPU, its work are done; it throws their
  // error. If the step was dropped, here or where `after` comes from, the task does not run and the
  // Event throws that.
  Event run(const Work& work, std::function<void(Stream&)> task);

  // Blocks until the tasks so far have run.
  void synchronize() { thread_.synchronize(); }
  [[nodiscard]] Event ran() { return thread_.record(); }  // is complete then

 private:
  [[nodiscard]] std::function<void()> with_errors_told(std::function<void()> task);
  [[nodiscard]] bool on_host() const { return device_.device().type == DeviceType::kHost; }
  [[nodiscard]] std::exception_ptr try_task(const Work& work,
                                            const std::function<void(Stream&)>& task,
                                            Event& enqueued);

  Outcome& outcome_;
  std::shared_ptr<IssueOrder::Issuer> issuer_;
  Stream thread_;
  Stream device_;
};

}  // namespace hsdp::reducer
