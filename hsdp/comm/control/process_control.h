// Control of a rank that is a process: rank 0 relays over Unix sockets (one host) or TCP.
//
// Owns one I/O thread. A forked child can neither use nor close it: every call there throws
// UsageError, and the child's copy is leaked on purpose.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/control/control_loop.h"
#include "hsdp/comm/control/rank_control.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/rendezvous/handshake.h"
#include "hsdp/comm/rendezvous/job_directory.h"
#include "hsdp/comm/rendezvous/launch_environment.h"

namespace hsdp::comm {

class ProcessControl final : public RankControl {
 public:
  // Meets all ranks of the job. Throws TimeoutError with the ranks that did not join, PeerLostError
  // for one that joined and died, and UsageError for missing settings.
  ProcessControl(const LaunchEnvironment& launch, std::chrono::milliseconds timeout);
  ~ProcessControl() override;
  ProcessControl(const ProcessControl&) = delete;
  ProcessControl& operator=(const ProcessControl&) = delete;

  [[nodiscard]] bool shares_memory_with(int peer) const override;
  [[nodiscard]] bool in_process() const override { return size() == 1; }
  [[nodiscard]] int host_of(int peer) const override {
    return size() == 1 ? 0 : hosts_.at(static_cast<std::size_t>(peer));
  }
  [[nodiscard]] std::string address() const override { return address_; }
  [[nodiscard]] const std::string& secret() const override { return secret_; }

  [[nodiscard]] std::vector<UniqueFd> exchange_descriptors(std::string_view key,
                                                           std::span<const int> members,
                                                           int fd) override;

 protected:
  [[nodiscard]] bool is_usable() const override { return fork_generation() == generation_; }
  void send(FrameType type, std::string body) override { loop_->send(type, std::move(body)); }
  void end_world(const WorldEnd& world_end) override { loop_->fail(world_end); }
  void run_callbacks_soon() override { loop_->run_callbacks_soon(); }

 private:
  using Time = std::chrono::steady_clock::time_point;

  void meet(const LaunchEnvironment& launch, Time end);
  void make_loop(const LaunchEnvironment& launch, Time end);
  void join_one_host(const LaunchEnvironment& launch, Time end);
  void join_hosts(const LaunchEnvironment& launch, Time end);
  void welcome_all(int door, const std::string& secret, const std::string& welcome_secret);
  void knock_until_welcomed(const LaunchEnvironment& launch, Time end);
  void connect_descriptors(const LaunchEnvironment& launch, const std::vector<std::string>& hosts,
                           Time end);
  void enter_tree(const LaunchEnvironment& launch, ControlTree tree, Time end);
  [[nodiscard]] JoinFrame own_frame(const LaunchEnvironment& launch) const;

  std::uint32_t generation_;
  std::string address_ = "127.0.0.1";
  std::string secret_;
  std::string process_ = random_secret();  // the same in a second attempt, not in a second process
  std::string host_;
  std::vector<bool> shares_;
  std::vector<int> hosts_;  // [rank], numbered; empty where it is alone
  std::unique_ptr<ControlLoop> loop_;
};

}  // namespace hsdp::comm
