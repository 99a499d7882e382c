// A Control between processes of one host that needs no library: messages are files in a shared
// folder. Only for checks, because it polls.
//
// A rank that fails writes a file, by which the others learn of the failure. A wait fails after
// `timeout`.
#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/listeners.h"

namespace hsdp::gpu {

class FileControl : public comm::Control {
 public:
  FileControl(std::filesystem::path folder, int rank, int size, std::chrono::milliseconds timeout);
  ~FileControl() override;
  FileControl(const FileControl&) = delete;
  FileControl& operator=(const FileControl&) = delete;

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int size() const override { return size_; }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return timeout_; }
  [[nodiscard]] bool shares_memory_with(int peer) const override { return peer == rank_; }
  [[nodiscard]] bool in_process() const override { return false; }
  [[nodiscard]] std::string address() const override { return "127.0.0.1"; }
  [[nodiscard]] const std::string& secret() const override { return secret_; }

  void post(std::string_view key, std::span<const int> members, const comm::Saying& mine) override;
  [[nodiscard]] comm::Agreement collect(std::string_view key, std::span<const int> members,
                                        comm::WaitState waiting) override;
  [[nodiscard]] std::optional<comm::Agreement> collect_within(
      std::string_view key, std::span<const int> members, comm::WaitState waiting,
      std::chrono::milliseconds time) override;
  void tell(int peer, std::string_view topic, std::string_view message) override;
  [[nodiscard]] std::shared_ptr<void> listen(std::string_view topic, Hear hear) override;
  [[nodiscard]] std::vector<comm::UniqueFd> exchange_descriptors(std::string_view key,
                                                                 std::span<const int> members,
                                                                 int fd) override;
  [[nodiscard]] std::vector<ControlLinkStats> links() const override { return {}; }  // not counted
  [[nodiscard]] int begin_wait(comm::WaitState state) override;
  void end_wait(int slot) override;
  void fail(const comm::Failure& failure) override;
  [[nodiscard]] bool failed() const override { return failed_.load(std::memory_order_relaxed); }
  void throw_if_failed() const override;
  [[nodiscard]] std::shared_ptr<void> on_failure(std::function<void()> wake) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Wait {
    std::string operation;  // with the bucket
    Clock::time_point since;
  };
  struct Callbacks {
    std::recursive_mutex mutex;  // a callback may drop its own handle
    std::map<int, std::function<void()>> wakes;
    int next = 0;
  };

  [[nodiscard]] std::filesystem::path file(std::string_view key, std::span<const int> members,
                                           int rank) const;
  void write(const std::filesystem::path& path, std::string_view text) const;
  [[nodiscard]] std::optional<comm::Agreement> collect_until(std::string_view key,
                                                             std::span<const int> members,
                                                             comm::WaitState waiting,
                                                             Clock::time_point end);
  void watch();
  void look();
  void look_for_messages();
  void accept(const comm::Failure& failure);

  std::filesystem::path folder_;
  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  std::string secret_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> closing_{false};
  mutable std::mutex mutex_;
  std::optional<comm::Failure> failure_;
  std::map<int, Wait> waits_;
  int next_slot_ = 0;
  // Shared with the handles, which may outlive this object.
  std::shared_ptr<Callbacks> callbacks_ = std::make_shared<Callbacks>();
  comm::Listeners listeners_;
  std::map<std::pair<std::string, int>, int> told_;   // messages sent, by topic and receiver
  std::map<std::pair<std::string, int>, int> heard_;  // messages read, by topic and sender
  std::thread thread_;
};

}  // namespace hsdp::gpu
