// One thread that issues the collectives of a mesh for all lanes with an Issuer, in one order on
// all its ranks [Note: one order for all collectives].
//
// A GPU runs its work in order, so two communicators can block each other for good if ranks issue
// their collectives in different orders. With one lane the order is that of the lane, and nothing
// is sent. With several, the ranks tell the mesh's first rank how many tasks of each lane they have
// ready, and it chooses among those that are ready on every rank: the one that came first, then the
// lowest place, then the oldest lane. If steps repeat themselves, all ranks repeat the order of the
// last one without messages, until a rank has another task first [Note: recorded turns].
//
// Tasks of a lane run in order. Ordered tasks must be the same on every rank; local ones run when
// they come to the front. A task that another rank does not have is a wait for that rank, which
// Control knows and bounds. After a failure of the world the tasks run without agreement, and meet
// the failure themselves. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "hsdp/comm/communicator.h"
#include "hsdp/device/stream.h"

namespace hsdp {

namespace comm {
class Control;
}  // namespace comm

class IssueOrder {
 public:
  static constexpr int kAfterBuckets = std::numeric_limits<int>::max();

  struct OrderedTask {
    std::function<void()> run;
    // The lowest goes first. A bucket's number, if the task comes when the bucket is ready: no rank
    // waits for it before the lane's next task of another kind has come. Else kAfterBuckets.
    int place = 0;
    // Called once, after all tasks that may change its answer: true makes the task a local one,
    // which does nothing.
    std::function<bool()> skipped;
    bool may_skip_later = false;  // the task changes the answers of later tasks' `skipped`
    bool ends_step = false;       // the next tasks are likely to repeat those of this step
    std::int64_t phase = -1;      // of a bucket: phase() when its last gradient came; -1: now
  };

  class Issuer {
   public:
    virtual ~Issuer() = default;  // waits for its tasks
    virtual void run_ordered(OrderedTask task) = 0;
    // For the lane's local tasks, events and waits.
    [[nodiscard]] virtual Stream& stream() = 0;
    // While the handle lives, buckets come when they are ready, at different times on each rank.
    // The calling thread is one that gives tasks.
    [[nodiscard]] virtual std::shared_ptr<void> open() = 0;
    // Number of ordered tasks, not counting buckets, given to any lane of this rank.
    [[nodiscard]] virtual std::int64_t phase() const = 0;
    // Notes that the calling thread gives tasks to this lane.
    virtual void give_here() = 0;
    // Such a thread calls `give` while it waits for another lane, if all ranks must issue this
    // lane's next task first: it gives that task at once, if it can. Empty: it cannot.
    virtual void on_need(std::function<void()> give) = 0;
    // Returns when `wait_for` is true, which waits up to the given time; meanwhile this thread
    // gives other lanes the tasks that must come first.
    using WaitFor = std::function<bool(std::chrono::microseconds)>;
    virtual void wait(const WaitFor& wait_for) = 0;
    // For other waits: what to call, without a lock, before waiting on. May be empty.
    [[nodiscard]] virtual std::function<void()> needed_first() = 0;
    // For a lane with buckets: before a microbatch's first one a rank may need what no record has,
    // so no rank repeats that bucket's turn before all have it. On every rank, while nothing is
    // open.
    virtual void meet_first() = 0;
    // Later tasks will not repeat the earlier order.
    virtual void stop_repeating() = 0;
    // A repeated turn has cost a step: none is repeated before a thousand equal steps.
    virtual void distrust() = 0;
    // While the handle lives, this rank still has to give tasks that other ranks may have already:
    // those of a step that it has dropped.
    [[nodiscard]] virtual std::shared_ptr<void> come_late() = 0;
  };

  // The IssueOrder of that group, the same for all callers.
  [[nodiscard]] static std::shared_ptr<IssueOrder> of(const Communicator& world);
  ~IssueOrder();
  IssueOrder(const IssueOrder&) = delete;
  IssueOrder& operator=(const IssueOrder&) = delete;

  // How long a task that is ready waits for the recorded turn of another lane if no thread waits
  // for it, in this process. For tests.
  static void set_patience(std::chrono::microseconds patience);
  // After that time a waiting thread checks whether it has to give a task first.
  [[nodiscard]] static std::chrono::microseconds time_to_look();

  // Call it before a thread issues a collective itself: waits until all tasks so far of the world's
  // lanes, which are the same on all ranks, are issued. Returns at once on the issuing thread,
  // while a lane is open, and after a failure.
  static void let_tasks_go_first(const comm::Control& control);

  // Collective, in the same order on every rank. Throws the world's failure.
  [[nodiscard]] std::unique_ptr<Issuer> add_issuer();

 private:
  struct State;
  class IssuerQueue;
  class QueueIssuer;
  explicit IssueOrder(const Communicator& world);

  std::shared_ptr<State> state_;
  std::shared_ptr<void> on_message_;
  std::shared_ptr<void> on_failure_;
};

}  // namespace hsdp
