// Where collectives are issued: a thread that runs tasks in order, and a stream of the device on
// which they enqueue their work.
//
// Host: the thread is the lane's own, and the stream is inline. GPU: the thread is the mesh's,
// where lanes take turns in one order on all ranks [Note: hops on a GPU]; with one Issuer, two
// lanes keep the order in which they are given tasks. Issuing never blocks. Thread-safe.
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

  // Every rank runs this task at this place among the collectives, unless its step is dropped.
  struct Task {
    std::function<void()> run;
    std::int64_t step = kNoStep;
    int place = IssueOrder::kAfterBuckets;
    bool may_drop = false;  // it may drop the step, and with it tasks that come later
    bool ends_step = false;
    std::int64_t phase = -1;  // of an OrderedTask
  };
  void issue(Task task);
  // Later tasks, and the work they enqueue, come after all of the other lane so far.
  void follow(const Lane& other);

  // Of the Issuer, on a GPU.
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

  // What the calling task enqueues on.
  [[nodiscard]] Stream stream() const { return device_.inside_task(); }

  // kAllRanks: every rank runs the task at this place among the collectives, and its error ends the
  // world, as the others are in its collective. kThisRank: its error is only the Event's.
  enum class Scope : std::uint8_t { kThisRank, kAllRanks };
  struct Work {
    Scope scope = Scope::kThisRank;
    std::int64_t step = kNoStep;
    Event after;
  };
  // Runs `task` after all tasks so far and after that Event, which must complete whatever happens,
  // as the Events of streams do. Returns at once. The Event it returns is done when the task and,
  // on a GPU, what it has enqueued are done, and throws what went wrong; where the step was
  // dropped, here or where `after` comes from, the task does not run and the Event says that.
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
