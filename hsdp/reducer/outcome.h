// What went wrong, as seen by the streams' tasks and the caller's threads.
//
// A failure (of the world, or of a task on this rank) is final: it ends the world, and every later
// call repeats it. An aborted step is raised once, at the next call, and leaves the Reducer usable.
// Thread-safe.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "hsdp/comm/communicator.h"

namespace hsdp::reducer {

class Outcome {
 public:
  explicit Outcome(Communicator world) : world_(std::move(world)) {}

  // Called after every change, without the lock, so that waiting threads look again.
  void set_on_change(std::function<void()> on_change) { on_change_ = std::move(on_change); }

  // Keeps the first error, and ends the world with its text: the others' calls throw an error that
  // names this rank. A local error that only follows from the world's end gives way to that.
  void fail(std::exception_ptr error);
  [[nodiscard]] bool failed() const;
  void rethrow_failure() const;  // no-op when none

  // Drops all work of epochs up to `through_epoch` and raises `error` at the next call.
  void abort_step(std::exception_ptr error, std::int64_t through_epoch, std::int64_t step);
  struct Abort {
    std::exception_ptr error;
    std::int64_t step = 0;  // the step that was dropped
    std::int64_t through_epoch = 0;
  };
  [[nodiscard]] std::optional<Abort> take_abort();
  void rethrow_abort() const;  // leaves it to be taken; no-op when none

  // True when a task of that epoch must do nothing.
  [[nodiscard]] bool skips(std::int64_t epoch) const;

 private:
  Communicator world_;
  mutable std::mutex mutex_;
  std::function<void()> on_change_ = [] {};
  std::exception_ptr failure_;
  std::optional<Abort> abort_;
  std::int64_t skip_through_epoch_ = -1;
};

}  // namespace hsdp::reducer
