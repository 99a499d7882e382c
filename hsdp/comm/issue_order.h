// One thread that issues the collectives of a mesh for everybody who has a lane here, in one order
// on all its ranks [Note: one order for all collectives].
//
// A GPU runs what it is given in order, so two communicators whose collectives are issued in
// another order on another rank can block each other for good. With one lane the order is that of
// the lane. With several the mesh's first rank chooses among what is ready there, the lowest place
// first, then the oldest lane; the others follow it.
//
// Tasks of a lane run in order. Ordered tasks must be the same on every rank; local ones run when
// they come to the front, without asking anybody. After a failure of the world nobody is asked any
// more. Thread-safe; add_lane() is collective, in the same order on every rank.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "hsdp/comm/communicator.h"
#include "hsdp/device/stream.h"

namespace hsdp {

class IssueOrder {
 public:
  class Lane {
   public:
    virtual ~Lane() = default;  // drains it
    // `place` decides who comes first, a bucket's number; a task that `skipped` says does nothing
    // is a local one.
    virtual void run_ordered(std::function<void()> task, int place,
                             std::function<bool()> skipped) = 0;
    // The lane's local tasks, events and waits.
    [[nodiscard]] virtual Stream& stream() = 0;
  };

  // The one of that group; everybody who asks for the same group gets the same.
  [[nodiscard]] static std::shared_ptr<IssueOrder> of(const Communicator& world);
  ~IssueOrder();
  IssueOrder(const IssueOrder&) = delete;
  IssueOrder& operator=(const IssueOrder&) = delete;

  [[nodiscard]] std::unique_ptr<Lane> add_lane();

 private:
  struct State;
  class LaneQueue;
  class LaneOfQueue;
  explicit IssueOrder(const Communicator& world);

  std::shared_ptr<State> state_;
};

}  // namespace hsdp
