// What the callers of a control connection and its I/O thread share: answers that came in, what is
// being waited for, and the failure that ended the world.
//
// Thread-safe. Knows nothing of sockets.
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

  // By whoever brings what came.
  void deliver(const std::string& exchange, std::optional<Agreement> agreement);
  void deliver_descriptor(const std::string& exchange, int from, UniqueFd fd);
  void welcome(WelcomeFrame frame);
  void hub_left();
  // A call for a descriptor met the limit of open files just now, and will be made again.
  void note_descriptor_limit() { limit_met_ms_.store(clock_.now().count()); }
  void hear(std::string_view topic, int from, std::string_view message) {
    listeners_.call(topic, from, message);
  }

  [[nodiscard]] bool at_descriptor_limit() const;

  // By callers: each waits for what it names, or throws what ended the world. What has come counts,
  // though the world ended since.
  [[nodiscard]] Agreement take(const std::string& exchange, WaitState waiting);
  // Nothing when it has not come after `time`. A wait like the others meanwhile, but a young one.
  [[nodiscard]] std::optional<Agreement> take_within(const std::string& exchange, WaitState waiting,
                                                     std::chrono::milliseconds time);
  // One from each member but `own_rank`, in the order of the members.
  [[nodiscard]] std::vector<UniqueFd> take_descriptors(const std::string& exchange,
                                                       std::span<const int> members, int own_rank,
                                                       WaitState waiting);
  [[nodiscard]] WelcomeFrame await_welcome();
  // As take(); nothing when a member has closed its world.
  [[nodiscard]] std::optional<Agreement> take_while_open(const std::string& exchange,
                                                         WaitState waiting);

  [[nodiscard]] std::shared_ptr<void> listen(std::string_view topic, Control::Hear hear) {
    return listeners_.add(topic, std::move(hear));
  }

  // The first one stays; true if this was it. Wakes all callers, but not the callbacks.
  bool end(const WorldEnd& world_end);
  // Acquire: who sees it sees what peers wrote before they left.
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }
  void throw_if_failed(const std::optional<WaitState>& doing = std::nullopt) const {
    if (failed()) throw_failure_of(doing);
  }
  [[nodiscard]] std::optional<WorldEnd> how_it_ended() const;
  [[nodiscard]] std::shared_ptr<void> on_failure(std::function<void()> wake);
  // Calls those that have not been called yet. By the I/O thread, after end().
  void run_callbacks();

 private:
  struct Callback {
    std::recursive_mutex mutex;  // the callback may drop its own handle
    std::function<void()> wake;
  };
  using Lock = std::unique_lock<std::mutex>;

  // Also tells the operation, bucket and seconds where the end only names a rank.
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
