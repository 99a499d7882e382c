// Passes file descriptors between the ranks of one host, through the leader, its lowest rank.
//
// Lives on the leader's I/O thread. It also watches the processes of its ranks.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/control/descriptor_channel.h"
#include "hsdp/comm/control/process_watch.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

class DescriptorBroker {
 public:
  struct Handlers {
    std::function<void(const std::string& exchange, int from, UniqueFd fd)> to_own;
    std::function<void(int rank)> on_process_end;
    std::function<bool(int rank)> is_watched;  // another watch covers this rank
    std::function<void()> on_limit;  // a call for a descriptor hit the limit; it will be retried
  };

  // Takes a listening, non-blocking SOCK_SEQPACKET socket. `local_ranks` are ascending; the first
  // is the leader.
  DescriptorBroker(boost::asio::io_context& io, UniqueFd listener, std::vector<int> local_ranks,
                   Handlers handlers);
  ~DescriptorBroker();
  DescriptorBroker(const DescriptorBroker&) = delete;
  DescriptorBroker& operator=(const DescriptorBroker&) = delete;

  // Passes on a descriptor from `rank` for `exchange`.
  void post(int rank, const std::string& exchange, UniqueFd fd);
  // Stops watching processes for which is_watched() is now true.
  void drop_needless_watches();

  // The name of an exchange: its key and its members.
  [[nodiscard]] static std::string name(std::string_view key, std::span<const int> members);
  // The first message of a rank, and the text that comes with each descriptor.
  [[nodiscard]] static std::string hello(int rank);
  [[nodiscard]] static std::string envelope(const std::string& exchange, int from);
  // Parses an envelope; false if it is malformed.
  [[nodiscard]] static bool open_envelope(const std::string& text, std::string& exchange,
                                          int& from);

 private:
  void accept_next();
  void accept_one();
  void greet(const std::shared_ptr<DescriptorChannel>& channel, const std::string& text);

  struct OwnDelivery {
    std::string exchange;
    int from;
    std::shared_ptr<const UniqueFd> fd;
  };
  void deliver_own();

  boost::asio::io_context& io_;
  boost::asio::posix::stream_descriptor listener_;
  ForkGuard listener_guard_;
  boost::asio::steady_timer accept_retry_;
  boost::asio::steady_timer deliver_retry_;
  std::vector<int> local_ranks_;
  Handlers handlers_;
  std::vector<std::shared_ptr<DescriptorChannel>> strangers_;
  std::map<int, std::shared_ptr<DescriptorChannel>> channels_;
  std::map<int, std::unique_ptr<ProcessWatch>> watches_;
  std::map<std::string, std::map<int, std::shared_ptr<const UniqueFd>>> pending_;
  std::deque<OwnDelivery> own_;  // for the leader itself
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace hsdp::comm
