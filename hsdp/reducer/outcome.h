// What went wrong, as seen by the streams' tasks and the caller's threads.
//
// A failure (peer lost, timeout, mismatch) is final: every later call repeats it. An aborted step
// is raised once, at the next call, and leaves the Reducer usable. Thread-safe.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>

namespace hsdp::reducer {

class Outcome {
 public:
  // Called after every change, without the lock, so that waiting threads look again.
  void set_on_change(std::function<void()> on_change) { on_change_ = std::move(on_change); }

  void fail(std::exception_ptr error);
  [[nodiscard]] bool failed() const;
  void rethrow_failure() const;  // no-op when none

  // Drops all work of epochs up to `through_epoch` and raises `error` at the next call.
  void abort_step(std::exception_ptr error, std::int64_t through_epoch, std::int64_t step);
  [[nodiscard]] bool aborted() const;
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
  mutable std::mutex mutex_;
  std::function<void()> on_change_ = [] {};
  std::exception_ptr failure_;
  std::optional<Abort> abort_;
  std::int64_t skip_through_epoch_ = -1;
};

}  // namespace hsdp::reducer
