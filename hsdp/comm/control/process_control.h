// Control of a rank that is a process of its own: rank 0 relays over Unix sockets (one host) or
// TCP.
//
// Owns one I/O thread. A forked child may neither use nor close it: every call there throws
// UsageError, and its copy is leaked on purpose.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/control_loop.h"
#include "hsdp/comm/control/control_state.h"
#include "hsdp/comm/rendezvous/handshake.h"
#include "hsdp/comm/rendezvous/job_directory.h"
#include "hsdp/comm/rendezvous/launch_environment.h"

namespace hsdp::comm {

class ProcessControl final : public Control {
 public:
  // Rendezvous with all ranks of the job. TimeoutError names who did not join, PeerLostError who
  // joined and died, UsageError what is not set.
  ProcessControl(const LaunchEnvironment& launch, std::chrono::milliseconds timeout);
  ~ProcessControl() override;
  ProcessControl(const ProcessControl&) = delete;
  ProcessControl& operator=(const ProcessControl&) = delete;

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }
  [[nodiscard]] bool shares_memory_with(int peer) const override;
  [[nodiscard]] bool in_process() const override { return size_ == 1; }
  [[nodiscard]] std::string address() const override { return address_; }
  [[nodiscard]] const std::string& secret() const override { return secret_; }

  void post(std::string_view key, std::span<const int> members, std::string_view message) override;
  [[nodiscard]] std::vector<std::string> collect(std::string_view key, std::span<const int> members,
                                                 WaitState waiting) override;
  [[nodiscard]] std::optional<std::vector<std::string>> collect_within(
      std::string_view key, std::span<const int> members, WaitState waiting,
      std::chrono::milliseconds time) override;
  [[nodiscard]] std::optional<std::vector<std::string>> exchange_while_open(
      std::string_view key, std::string_view message, WaitState waiting) override;
  void tell(int peer, std::string_view topic, std::string_view message) override;
  [[nodiscard]] std::shared_ptr<void> listen(std::string_view topic, Hear hear) override;
  [[nodiscard]] std::vector<UniqueFd> exchange_descriptors(std::string_view key,
                                                           std::span<const int> members,
                                                           int fd) override;
  [[nodiscard]] std::vector<ControlLinkStats> links() const override {
    return state_->traffic().links();
  }
  [[nodiscard]] int begin_wait(WaitState state) override;
  void end_wait(int slot) override;
  void fail(const Failure& failure) override;
  [[nodiscard]] bool failed() const override;
  void throw_if_failed() const override;
  void throw_if_failed_in(std::string_view operation) const override;
  [[nodiscard]] std::shared_ptr<void> on_failure(std::function<void()> wake) override;

 private:
  using Time = std::chrono::steady_clock::time_point;

  [[nodiscard]] bool is_forked() const;
  void require_own_process() const;
  void send_post(const PostFrame& frame);
  void require_member(std::span<const int> members) const;
  void meet(const LaunchEnvironment& launch, Time end);
  void make_loop(const LaunchEnvironment& launch, Time end);
  void join_one_host(const LaunchEnvironment& launch, Time end);
  void join_hosts(const LaunchEnvironment& launch, Time end);
  void welcome_all(int door, const std::string& secret, const std::string& welcome_secret);
  void knock_until_welcomed(const LaunchEnvironment& launch, Time end);
  void connect_descriptors(const LaunchEnvironment& launch, const std::vector<std::string>& hosts,
                           Time end);
  [[nodiscard]] JoinFrame own_frame(const LaunchEnvironment& launch) const;

  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  std::uint32_t generation_;
  std::string address_ = "127.0.0.1";
  std::string secret_;
  std::string process_ = random_secret();  // tells rank 0 a second attempt from a second process
  std::string host_;
  std::vector<bool> shares_;
  std::shared_ptr<ControlState> state_;
  std::unique_ptr<ControlLoop> loop_;
};

}  // namespace hsdp::comm
