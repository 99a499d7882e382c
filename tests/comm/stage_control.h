// A Control that passes everything on to another one, and on the way simulates several hosts,
// processes or a secret.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"

namespace hsdp::test {

struct Stage {
  int ranks_per_host = 0;  // 0: all ranks on one host
  bool processes = false;  // ranks that are threads map each other's memory nevertheless
  std::string secret;
  // Called with the addresses that ranks tell each other, before they connect.
  std::function<void(const std::string& address)> on_address;
  // Returns what a rank tells the others instead of its address.
  std::function<std::string(int rank, const std::string& address)> told_address;
  // Called with all of them on each rank, before it connects and listens.
  std::function<void(int rank, const std::vector<std::string>& addresses)> before_connecting;
};

class StageControl : public comm::Control {
 public:
  StageControl(std::shared_ptr<comm::Control> inner, Stage stage)
      : inner_(std::move(inner)), stage_(std::move(stage)) {}

  [[nodiscard]] int rank() const override { return inner_->rank(); }
  [[nodiscard]] int size() const override { return inner_->size(); }
  [[nodiscard]] std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  [[nodiscard]] bool shares_memory_with(int peer) const override {
    return stage_.ranks_per_host == 0 ||
           peer / stage_.ranks_per_host == rank() / stage_.ranks_per_host;
  }
  [[nodiscard]] bool in_process() const override {
    return inner_->in_process() && !stage_.processes;
  }
  [[nodiscard]] std::string address() const override { return inner_->address(); }
  [[nodiscard]] const std::string& secret() const override { return stage_.secret; }
  void post(std::string_view key, std::span<const int> members, const comm::Saying& mine) override {
    if (!key.ends_with("/tcp")) return inner_->post(key, members, mine);
    std::string address = mine.equal.at(0).value();
    if (stage_.on_address) stage_.on_address(address);
    if (stage_.told_address) address = stage_.told_address(rank(), address);
    inner_->post(key, members, comm::message_to_all(std::move(address)));
  }
  [[nodiscard]] comm::Agreement collect(std::string_view key, std::span<const int> members,
                                        comm::WaitState waiting) override {
    comm::Agreement all = inner_->collect(key, members, waiting);
    if (stage_.before_connecting && key.ends_with("/tcp")) {
      stage_.before_connecting(rank(), all.messages(members));
    }
    return all;
  }
  [[nodiscard]] std::optional<comm::Agreement> collect_within(
      std::string_view key, std::span<const int> members, comm::WaitState waiting,
      std::chrono::milliseconds time) override {
    return inner_->collect_within(key, members, waiting, time);
  }
  void tell(int peer, std::string_view topic, std::string_view message) override {
    inner_->tell(peer, topic, message);
  }
  [[nodiscard]] std::shared_ptr<void> listen(std::string_view topic, Hear hear) override {
    return inner_->listen(topic, std::move(hear));
  }
  [[nodiscard]] std::vector<comm::UniqueFd> exchange_descriptors(std::string_view key,
                                                                 std::span<const int> members,
                                                                 int fd) override {
    return inner_->exchange_descriptors(key, members, fd);
  }
  [[nodiscard]] std::vector<ControlLinkStats> links() const override { return inner_->links(); }
  [[nodiscard]] int begin_wait(comm::WaitState state) override { return inner_->begin_wait(state); }
  void end_wait(int slot) override { inner_->end_wait(slot); }
  void fail(const comm::Failure& failure) override { inner_->fail(failure); }
  [[nodiscard]] bool failed() const override { return inner_->failed(); }
  void throw_if_failed() const override { inner_->throw_if_failed(); }
  void throw_if_failed_in(std::string_view operation) const override {
    inner_->throw_if_failed_in(operation);
  }
  [[nodiscard]] std::shared_ptr<void> on_failure(std::function<void()> wake) override {
    return inner_->on_failure(std::move(wake));
  }

 private:
  std::shared_ptr<comm::Control> inner_;
  Stage stage_;
};

}  // namespace hsdp::test
