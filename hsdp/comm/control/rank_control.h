// The shared part of Control for ranks that are processes and ranks that are threads: checks calls
// and turns them into messages to rank 0; what arrives is in the ControlState.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/control_state.h"

namespace hsdp::comm {

class RankControl : public Control {
 public:
  RankControl(int rank, int size, std::chrono::milliseconds timeout)
      : rank_(rank), size_(size), timeout_(timeout) {}

  [[nodiscard]] int rank() const final { return rank_; }
  [[nodiscard]] int size() const final { return size_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const final { return timeout_; }

  void post(std::string_view key, std::span<const int> members, const Saying& mine) final;
  [[nodiscard]] Agreement collect(std::string_view key, std::span<const int> members,
                                  WaitState waiting) final;
  [[nodiscard]] std::optional<Agreement> collect_within(std::string_view key,
                                                        std::span<const int> members,
                                                        WaitState waiting,
                                                        std::chrono::milliseconds time) final;
  [[nodiscard]] std::optional<std::vector<std::string>> exchange_while_open(
      std::string_view key, std::string_view message, WaitState waiting) final;
  void tell(int peer, std::string_view topic, std::string_view message) final;
  [[nodiscard]] std::shared_ptr<void> listen(std::string_view topic, Hear hear) final;
  [[nodiscard]] std::vector<ControlLinkStats> links() const final {
    return state_->traffic().links();
  }
  [[nodiscard]] int begin_wait(WaitState state) final { return state_->begin_wait(state); }
  void end_wait(int slot) final { state_->end_wait(slot); }
  void fail(const Failure& failure) final;
  [[nodiscard]] bool failed() const final { return state_->failed() || !is_usable(); }
  void throw_if_failed() const final;
  void throw_if_failed_in(std::string_view operation) const final;
  [[nodiscard]] std::shared_ptr<void> on_failure(std::function<void()> wake) final;
  [[nodiscard]] ControlReport report() const final { return state_->report(); }

 protected:
  // False in a forked child.
  [[nodiscard]] virtual bool is_usable() const { return true; }
  void require_usable() const;
  void require_member(std::span<const int> members) const;
  // Sends to rank 0; never blocks.
  virtual void send(FrameType type, std::string body) = 0;
  virtual void end_world(const WorldEnd& world_end) = 0;
  virtual void run_callbacks_soon() = 0;

  [[nodiscard]] const std::shared_ptr<ControlState>& state() const { return state_; }
  // Makes send_post() name each group again, to another rank.
  void forget_groups();
  // Call before the user's first call.
  void set_state(std::shared_ptr<ControlState> state) { state_ = std::move(state); }

 private:
  // Names the group before its first exchange.
  void send_post(std::span<const int> members, PostFrame frame);

  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<ControlState> state_;
  std::mutex mutex_;  // guards the next member
  std::set<std::uint64_t> named_groups_;
};

}  // namespace hsdp::comm
