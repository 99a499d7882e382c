// Keeps what went wrong in the lanes' tasks and on the caller's threads. Thread-safe.
//
// - A failure, of the world or of a task on this rank, ends the world; every later call repeats it
//   [Note: after a failure].
// - A drop is a step that another rank dropped. The next call throws it, once; the Reducer stays
//   usable.
// - A fault is this rank's mistake in the open microbatch. The microbatch's end drops the step.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/comm/communicator.h"

namespace hsdp::reducer {

// A step that another rank dropped: the parts of a StepAbortedError.
struct Drop {
  std::string message;
  std::vector<int> ranks;  // of the world
  std::string by{};        // which rank of the mesh, and why
};

// The step of a task that no drop concerns.
constexpr std::int64_t kNoStep = std::numeric_limits<std::int64_t>::max();

class Outcome {
 public:
  // `title`: the Reducer's name in the message of a failure that other ranks see.
  explicit Outcome(Communicator world, std::string title = "reducer")
      : world_(std::move(world)), title_(std::move(title)) {}

  // Called after every change, without the lock, to wake waiting threads.
  void set_on_change(std::function<void()> on_change) { on_change_ = std::move(on_change); }

  // Keeps the first error and ends the world with its text: calls on other ranks throw an error
  // that names this rank. If the world has ended already, keeps its failure instead of a local
  // error that follows from it.
  void fail(std::exception_ptr error);
  [[nodiscard]] bool failed() const { return has_failure_; }
  // Throws the failure, if any. If no task here has met the world's end yet, `call` says in its
  // message what this rank was doing.
  void rethrow_failure(std::string_view call);

  // Takes the error as a fault if it is the first since open_faults(). False, without taking it,
  // after settle_faults() has found none.
  void open_faults();
  bool note_fault(std::exception_ptr& error);
  // The fault, if there is one.
  [[nodiscard]] std::exception_ptr settle_faults();
  [[nodiscard]] std::exception_ptr fault() const;  // the same without settling

  // Makes tasks of steps up to `step` do nothing. The next call throws `drop`; none if this rank
  // dropped the step itself.
  void drop_step(std::int64_t step, std::optional<Drop> drop);
  // Returns the drop that is to be thrown, if any, and forgets it.
  [[nodiscard]] std::optional<Drop> take_drop();
  void throw_drop() const;  // throws it, if any, without forgetting it

  // Runs `task` unless skips(step); its error becomes the failure.
  void guard(std::int64_t step, const std::function<void()>& task);
  // Whether a task of that step must do nothing.
  [[nodiscard]] bool skips(std::int64_t step) const;
  // Why a task of that step must do nothing; null if it may run.
  [[nodiscard]] std::exception_ptr refusal(std::int64_t step) const;

 private:
  Communicator world_;
  std::string title_;
  mutable std::mutex mutex_;
  std::function<void()> on_change_ = [] {};
  // Checked for each gradient, without the lock.
  std::atomic<bool> has_failure_{false};
  std::atomic<bool> has_drop_{false};
  std::exception_ptr failure_;
  bool faults_open_ = false;
  std::exception_ptr fault_;
  std::optional<Drop> drop_;
  Drop last_drop_;
  std::int64_t skip_through_step_ = -1;
};

[[noreturn]] void throw_drop(Drop drop);

// The text of any exception.
[[nodiscard]] std::string text_of(const std::exception_ptr& error);

}  // namespace hsdp::reducer
