// Control for ranks that are threads of one process: mailboxes, a shared failure, and a watch that
// ends waits which last too long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/control_traffic.h"
#include "hsdp/comm/control/listeners.h"

namespace hsdp::comm {

// What the ranks of one in-process world share. Thread-safe. Owned by their controls together.
class InProcessHub {
 public:
  using Clock = std::chrono::steady_clock;

  InProcessHub(int size, std::chrono::milliseconds timeout);
  ~InProcessHub();
  InProcessHub(const InProcessHub&) = delete;
  InProcessHub& operator=(const InProcessHub&) = delete;

  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const { return timeout_; }

  void post(const std::string& key, std::span<const int> members, int rank,
            std::string_view message);
  // Nothing when a message has not come by `end`.
  [[nodiscard]] std::optional<std::vector<std::string>> collect_until(const std::string& key,
                                                                      std::span<const int> members,
                                                                      int rank, WaitState waiting,
                                                                      Clock::time_point end);
  void tell(int from, int peer, std::string_view topic, std::string_view message);
  [[nodiscard]] std::shared_ptr<void> listen(int rank, std::string_view topic, Control::Hear hear);
  [[nodiscard]] ControlTraffic& traffic(int rank) {
    return traffic_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] int begin_wait(int rank, WaitState state);
  void end_wait(int slot);

  void fail(const Failure& failure);
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }
  void throw_if_failed() const;
  [[nodiscard]] int add_callback(std::function<void()> wake);
  void remove_callback(int number);

 private:
  struct Exchange {
    std::map<int, std::string> messages;  // by world rank
    std::size_t collected = 0;
  };
  struct Wait {
    int rank = 0;
    WaitState state;
    Clock::time_point since;
  };

  // Whoever of the members is missing in it, or their end.
  [[nodiscard]] static std::span<const int>::iterator missing_in(const Exchange& exchange,
                                                                 std::span<const int> members);
  // All messages, which are there; with mutex_ held.
  [[nodiscard]] std::vector<std::string> take(const std::string& key, std::span<const int> members);
  void watch();
  [[nodiscard]] std::optional<Failure> judge() const;  // with mutex_ held
  [[nodiscard]] std::vector<int> chain_end(int rank) const;
  void run_callbacks();

  const int size_;
  const std::chrono::milliseconds timeout_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Exchange> exchanges_;
  std::vector<Listeners> listeners_;  // by rank; they lock for themselves, as does
  std::vector<ControlTraffic> traffic_;
  std::map<int, Wait> waits_;  // by slot
  int next_slot_ = 0;
  std::optional<Failure> failure_;
  bool closing_ = false;
  std::mutex callbacks_mutex_;
  std::map<int, std::function<void()>> callbacks_;
  int next_callback_ = 0;
  bool callbacks_ran_ = false;
  std::thread watch_;
};

}  // namespace hsdp::comm
