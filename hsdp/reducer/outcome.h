// What went wrong, as seen by the lanes' tasks and the caller's threads.
//
// A failure (of the world, or of a task on this rank) is final: it ends the world, and every later
// call repeats it [Note: after a failure]. A dropped step is raised once, at the next call, and
// leaves the Reducer usable.
// A fault is this rank's own mistake in the open microbatch, which drops the step at its end.
// Thread-safe.
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

// That another rank dropped a step, as the others are told: a StepAbortedError.
struct Drop {
  std::string message;
  std::vector<int> ranks;  // of the world
  std::string by{};        // which of the mesh, and why
};

// Of what no dropped step concerns.
constexpr std::int64_t kNoStep = std::numeric_limits<std::int64_t>::max();

class Outcome {
 public:
  // `title`: whose it is, in what other users of the mesh hear of a failure.
  explicit Outcome(Communicator world, std::string title = "reducer")
      : world_(std::move(world)), title_(std::move(title)) {}

  // Called after every change, without the lock, so that waiting threads look again.
  void set_on_change(std::function<void()> on_change) { on_change_ = std::move(on_change); }

  // Keeps the first error, and ends the world with its text: the others' calls throw an error that
  // names this rank. A local error that only follows from the world's end gives way to that.
  void fail(std::exception_ptr error);
  [[nodiscard]] bool failed() const { return has_failure_; }
  // Throws the failure, no-op when none. It may be the world's end that no task here has met yet:
  // then `call` says what this rank was doing.
  void rethrow_failure(std::string_view call);

  // Keeps the first error since open_faults(). False, and nothing is taken, once settle_faults()
  // has found none.
  void open_faults();
  bool note_fault(std::exception_ptr& error);
  // The fault, if there is one.
  [[nodiscard]] std::exception_ptr settle_faults();
  [[nodiscard]] std::exception_ptr fault() const;  // the same, and nothing is settled

  // Tasks of steps up to `step` do nothing from here on. `drop`: to raise at the next call; none
  // where this rank dropped the step itself.
  void drop_step(std::int64_t step, std::optional<Drop> drop);
  // Whether there is one to raise; it is forgotten then.
  [[nodiscard]] std::optional<Drop> take_drop();
  void throw_drop() const;  // leaves it to be taken; no-op when none

  // Runs `task` unless its step is over, and fails with its error.
  void guard(std::int64_t step, const std::function<void()>& task);
  // True when a task of that step must do nothing.
  [[nodiscard]] bool skips(std::int64_t step) const;
  // Why it must, for whoever waits for it; null when it may run.
  [[nodiscard]] std::exception_ptr refusal(std::int64_t step) const;

 private:
  Communicator world_;
  std::string title_;
  mutable std::mutex mutex_;
  std::function<void()> on_change_ = [] {};
  // Each gradient asks for these two, which need no lock until there is one.
  std::atomic<bool> has_failure_{false};
  std::atomic<bool> has_drop_{false};
  std::exception_ptr failure_;
  bool faults_open_ = false;
  std::exception_ptr fault_;
  std::optional<Drop> drop_;
  Drop last_drop_;
  std::int64_t skip_through_step_ = -1;
};

// Throws it as an error.
[[noreturn]] void throw_drop(Drop drop);

// An error's text, whatever it is.
[[nodiscard]] std::string text_of(const std::exception_ptr& error);

}  // namespace hsdp::reducer
