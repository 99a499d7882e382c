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
    // The lowest goes first. A bucket's number: it comes when it is ready, and no rank waits for it
    // before the lane's next task of another kind has come. Or kAfterBuckets.
    int place = 0;
    // Asked once, when everything before that may change the answer has run: true makes it a local
    // task, which does nothing.
    std::function<bool()> skipped;
    bool may_skip_later = false;  // it changes what later tasks' `skipped` answers
    bool ends_step = false;       // what comes next is likely to be what came in this step
    std::int64_t phase = -1;      // a bucket's: phase() when its last gradient came; or now
  };

  class Issuer {
   public:
    virtual ~Issuer() = default;  // drains it
    virtual void run_ordered(OrderedTask task) = 0;
    // Its local tasks, events and waits.
    [[nodiscard]] virtual Stream& stream() = 0;
    // While it lives, buckets come when they are ready, which is at other times on other ranks. The
    // calling thread gives tasks.
    [[nodiscard]] virtual std::shared_ptr<void> open() = 0;
    // How many tasks but buckets have come to all lanes of this rank.
    [[nodiscard]] virtual std::int64_t phase() const = 0;
    // The calling thread gives tasks to this lane.
    virtual void give_here() = 0;
    // What such a thread calls while it waits for another lane's task, and all ranks must issue
    // this lane's next one before: gives that at once, where it can. Empty: nothing can be done.
    virtual void on_need(std::function<void()> give) = 0;
    // `wait_for` waits so long at most, and says whether what this lane does has come. Returns when
    // it has; meanwhile this thread gives other lanes what must come first.
    using WaitFor = std::function<bool(std::chrono::microseconds)>;
    virtual void wait(const WaitFor& wait_for) = 0;
    // For a wait of one's own: what to call before going on with it, without a lock. Or nothing.
    [[nodiscard]] virtual std::function<void()> needed_first() = 0;
    // This lane has buckets, and before a microbatch's first one a rank may need what no record
    // has: no rank repeats that bucket's turn before all have it. On every rank, while nothing is
    // open.
    virtual void meet_first() = 0;
    // What comes now is not what came before: no turn is to be repeated.
    virtual void stop_repeating() = 0;
    // A repeated turn has cost a step: none is repeated again before a thousand equal steps.
    virtual void distrust() = 0;
    // While it lives, tasks are still to come that other ranks may have by now: those of a step
    // that this rank has dropped.
    [[nodiscard]] virtual std::shared_ptr<void> come_late() = 0;
  };

  // The one of that group; everybody who asks for the same group gets the same.
  [[nodiscard]] static std::shared_ptr<IssueOrder> of(const Communicator& world);
  ~IssueOrder();
  IssueOrder(const IssueOrder&) = delete;
  IssueOrder& operator=(const IssueOrder&) = delete;

  // How long a task that is ready waits for the recorded turn of another lane where no thread waits
  // for it, in this process. For tests.
  static void set_patience(std::chrono::microseconds patience);
  // After so long a thread that waits looks whether it has to give something first.
  [[nodiscard]] static std::chrono::microseconds time_to_look();

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
