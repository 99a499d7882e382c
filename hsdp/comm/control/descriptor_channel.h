// Sends short messages, each with one file descriptor, over a Unix SOCK_SEQPACKET socket.
//
// Lives on the I/O thread. send() queues and never blocks. A malformed message closes the channel.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

class DescriptorChannel : public std::enable_shared_from_this<DescriptorChannel> {
 public:
  static constexpr std::size_t kMaxTextBytes = 60U << 10U;

  struct Handlers {
    // `fd` is empty for a message without a descriptor.
    std::function<void(const std::string& text, UniqueFd fd)> on_message;
    std::function<void()> on_limit;  // no descriptor number is free: the message waits
  };

  DescriptorChannel(boost::asio::io_context& io, UniqueFd socket);
  ~DescriptorChannel() { close(); }
  DescriptorChannel(const DescriptorChannel&) = delete;
  DescriptorChannel& operator=(const DescriptorChannel&) = delete;

  void start(Handlers handlers);
  void set_handlers(Handlers handlers);
  void send(std::string text, std::shared_ptr<const UniqueFd> fd);  // null: none
  void close();
  [[nodiscard]] std::optional<pid_t> peer_pid();

 private:
  struct Message {
    std::string text;
    std::shared_ptr<const UniqueFd> fd;  // shared by all receivers
  };
  enum class Read : std::uint8_t { kMessage, kNothing, kNoRoom };  // nothing yet, or closed
  void read_next();
  void read_later();
  [[nodiscard]] Read read_one();
  void write_ready();
  [[nodiscard]] bool write_one(const Message& message);
  void write_later();

  boost::asio::posix::stream_descriptor socket_;
  boost::asio::steady_timer read_retry_;
  boost::asio::steady_timer write_retry_;
  ForkGuard guard_;
  bool open_ = true;
  bool writing_ = false;
  std::shared_ptr<Handlers> handlers_;
  std::deque<Message> queue_;
};

}  // namespace hsdp::comm
