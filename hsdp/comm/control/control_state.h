// The state that callers of a control connection share with its I/O thread: answers that arrived,
// current waits, and the failure that ended the world. Thread-safe. Knows nothing of sockets.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/control_frames.h"
#include "hsdp/comm/control/control_traffic.h"
#include "hsdp/comm/control/listeners.h"
#include "hsdp/comm/control/own_clock.h"
#include "hsdp/comm/control/wait_slots.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

class ControlState {
 public:
  explicit ControlState(OwnClock::Source source = OwnClock::steady_ms, const void* of = nullptr)
      : clock_(source, of) {}

  [[nodiscard]] OwnClock& clock() { return clock_; }
  [[nodiscard]] ControlTraffic& traffic() { return traffic_; }
  [[nodiscard]] std::vector<ActiveWait> active_waits() const { return slots_.active(clock_.now()); }
  [[nodiscard]] int begin_wait(const WaitState& state, std::uint64_t exchange = 0) {
    return slots_.begin(state, exchange, clock_.now());
  }
  void end_wait(int slot) { slots_.end(slot); }

  // Called by the receiving thread.
  void deliver(const std::string& exchange, std::optional<Agreement> agreement);
  void deliver_descriptor(const std::string& exchange, int from, UniqueFd fd);
  void welcome(WelcomeFrame frame);
  void hub_left();
  // A call for a descriptor has just hit the limit of open files, and will be retried.
  void note_descriptor_limit() { limit_met_ms_.store(clock_.now().count()); }
  void hear(std::string_view topic, int from, std::string_view message) {
    listeners_.call(topic, from, message);
  }

  [[nodiscard]] bool at_descriptor_limit() const;

  // Called by callers. Each waits for the named exchange, or throws the error that ended the world.
  // What has arrived counts, even if the world has ended since.
  [[nodiscard]] Agreement take(const std::string& exchange, WaitState waiting);
  // Returns nothing after `time`. Each call is a new wait, so calling again does not time out.
  [[nodiscard]] std::optional<Agreement> take_within(const std::string& exchange, WaitState waiting,
                                                     std::chrono::milliseconds time);
  // One from each member except `own_rank`, in the order of the members.
  [[nodiscard]] std::vector<UniqueFd> take_descriptors(const std::string& exchange,
                                                       std::span<const int> members, int own_rank,
                                                       WaitState waiting);
  [[nodiscard]] WelcomeFrame await_welcome();
  // Like take(), but returns nothing if a member has closed its world.
  [[nodiscard]] std::optional<Agreement> take_while_open(const std::string& exchange,
                                                         WaitState waiting);

  [[nodiscard]] std::shared_ptr<void> listen(std::string_view topic, Control::Hear hear) {
    return listeners_.add(topic, std::move(hear));
  }

  // Records the first end; true if this was it. Wakes all callers, but does not run callbacks.
  bool end(const WorldEnd& world_end);
  // Acquire: a thread that reads true also sees what peers wrote before they left.
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }
  void throw_if_failed(const std::optional<WaitState>& doing = std::nullopt) const {
    if (failed()) throw_failure_of(doing);
  }
  [[nodiscard]] std::optional<WorldEnd> how_it_ended() const;
  [[nodiscard]] ControlReport report() const;
  [[nodiscard]] std::shared_ptr<void> on_failure(std::function<void()> wake);
  // Runs the callbacks not yet called. For the I/O thread, after end().
  void run_callbacks();

 private:
  struct Callback {
    std::recursive_mutex mutex;  // recursive: the callback may drop its own handle
    std::function<void()> wake;
  };
  using Lock = std::unique_lock<std::mutex>;

  // Adds the operation, bucket and seconds if the end only names a rank.
  [[noreturn]] void throw_failure_of(const std::optional<WaitState>& doing) const;
  [[nodiscard]] Failure describe(const std::optional<WaitState>& doing) const;
  template <typename Ready>
  void wait_until(Lock& lock, WaitState waiting, std::uint64_t exchange, Ready ready);

  OwnClock clock_;
  ControlTraffic traffic_;
  WaitSlots slots_;
  Listeners listeners_;
  std::atomic<bool> failed_{false};
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::min();
  std::atomic<std::int64_t> limit_met_ms_{kNever};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::optional<Agreement>> answers_;
  std::map<std::string, std::map<int, UniqueFd>> descriptors_;
  std::optional<WelcomeFrame> welcome_;
  bool hub_left_ = false;
  std::optional<WorldEnd> end_;
  std::optional<ActiveWait> wait_at_end_;
  mutable std::optional<Failure> described_;
  std::vector<std::weak_ptr<Callback>> callbacks_;
};

}  // namespace hsdp::comm
