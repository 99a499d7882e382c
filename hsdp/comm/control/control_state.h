// What the callers of a control connection and its I/O thread share: answers that came in, what is
// being waited for, and the failure that ended the world.
//
// Thread-safe. Knows nothing of sockets.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/control_frames.h"
#include "hsdp/comm/control/own_clock.h"
#include "hsdp/comm/control/wait_slots.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

class ControlState {
 public:
  [[nodiscard]] OwnClock& clock() { return clock_; }
  [[nodiscard]] std::vector<ActiveWait> active_waits() const { return slots_.active(clock_.now()); }
  [[nodiscard]] int begin_wait(const WaitState& state, std::uint64_t exchange = 0) {
    return slots_.begin(state, exchange, clock_.now());
  }
  void end_wait(int slot) { slots_.end(slot); }

  // By the I/O thread.
  void deliver(const std::string& exchange, std::vector<std::string> messages);
  void deliver_descriptor(const std::string& exchange, int from, UniqueFd fd);
  void welcome(WelcomeFrame frame);

  // By callers: each waits for what it names, or throws what ended the world.
  [[nodiscard]] std::vector<std::string> take(const std::string& exchange, WaitState waiting);
  // One from each member but `own_rank`, in the order of the members.
  [[nodiscard]] std::vector<UniqueFd> take_descriptors(const std::string& exchange,
                                                       std::span<const int> members, int own_rank,
                                                       WaitState waiting);
  [[nodiscard]] WelcomeFrame await_welcome();

  // The first one stays; true if this was it. Wakes all callers, but not the callbacks.
  bool end(const Verdict& verdict);
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_relaxed); }
  void throw_if_failed() const {
    if (failed()) throw_failure_of(std::nullopt);
  }
  [[nodiscard]] std::shared_ptr<void> on_failure(std::function<void()> wake);
  // Calls those that have not been called yet. By the I/O thread, after end().
  void run_callbacks();

 private:
  struct Callback {
    std::recursive_mutex mutex;  // the callback may drop its own handle
    std::function<void()> wake;
  };
  using Lock = std::unique_lock<std::mutex>;

  // Also tells the operation, bucket and seconds where the verdict only names a rank.
  [[noreturn]] void throw_failure_of(const std::optional<WaitState>& doing) const;
  [[nodiscard]] Failure describe(const std::optional<WaitState>& doing) const;
  template <typename Ready>
  void wait_until(Lock& lock, WaitState waiting, std::uint64_t exchange, Ready ready);

  OwnClock clock_;
  WaitSlots slots_;
  std::atomic<bool> failed_{false};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<std::string>> answers_;
  std::map<std::string, std::map<int, UniqueFd>> descriptors_;
  std::optional<WelcomeFrame> welcome_;
  std::optional<Verdict> verdict_;
  std::optional<ActiveWait> wait_at_end_;
  mutable std::optional<Failure> described_;
  std::vector<std::weak_ptr<Callback>> callbacks_;
};

}  // namespace hsdp::comm
