// One thread that issues the collectives of a mesh for all lanes that have an Issuer here, in one
// order on all its ranks [Note: one order for all collectives].
//
// A GPU runs what it is given in order, so two communicators whose collectives are issued in
// another order on another rank can block each other for good. With one lane the order is that of
// the lane, and nothing is sent. With several, the ranks tell the mesh's first one how many tasks
// of each lane they have ready, and it chooses among those that are ready on every rank: what came
// first, then the lowest place, then the oldest lane. When steps repeat themselves, all repeat the
// order of the last one and send nothing, until a rank has another task first [Note: recorded
// turns].
//
// Tasks of a lane run in order. Ordered tasks must be the same on every rank; local ones run when
// they come to the front, without asking anybody. A task that another rank does not have is a wait
// for that rank, which Control knows and bounds. After a failure of the world nobody is asked any
// more: the tasks run and find out themselves. Thread-safe.
#pragma once

#include <chrono>
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
    // The lowest goes first. A bucket's number: it comes when it is ready, and no rank waits for it
    // before the lane's next task of another kind has come. Or kAfterBuckets.
    int place = 0;
    // Asked once, when everything before that may change the answer has run: true makes it a local
    // task, which does nothing.
    std::function<bool()> skipped;
    bool may_skip_later = false;  // it changes what later tasks' `skipped` answers
    bool ends_step = false;       // what comes next is likely to be what came in this step
  };

  class Issuer {
   public:
    virtual ~Issuer() = default;  // drains it
    virtual void run_ordered(OrderedTask task) = 0;
    // Its local tasks, events and waits.
    [[nodiscard]] virtual Stream& stream() = 0;
    // While it lives, tasks come when they are ready, which is at other times on other ranks.
    [[nodiscard]] virtual std::shared_ptr<void> open() = 0;
    // While it lives, tasks are still to come that other ranks may have by now: those of a step
    // that this rank has dropped.
    [[nodiscard]] virtual std::shared_ptr<void> come_late() = 0;
    // From now on tasks may come before those of other lanes on one rank and after them on another.
    virtual void come_anywhere() = 0;
  };

  // The one of that group; everybody who asks for the same group gets the same.
  [[nodiscard]] static std::shared_ptr<IssueOrder> of(const Communicator& world);
  ~IssueOrder();
  IssueOrder(const IssueOrder&) = delete;
  IssueOrder& operator=(const IssueOrder&) = delete;

  // Steps whose lanes overlap are recorded, too, from now on in this process, and a task that is
  // ready waits so long for the recorded turn of another lane; zero: not any more. Where a rank has
  // a task later than in the step before, ranks may wait for each other. HSDP_RECORD_TURNS=1 in the
  // environment means 100 ms.
  static void record_overlaps(std::chrono::microseconds patience);

  // Before a thread issues a collective itself: waits until all tasks so far of the world's lanes
  // are issued, which are the same on all ranks. Returns at once on the thread that issues them,
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
