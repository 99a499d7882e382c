// Carries short messages, each with one file descriptor, over a Unix SOCK_SEQPACKET socket.
//
// Lives on the I/O thread. send() queues and never blocks. A message that breaks the format closes
// the channel.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
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

  using MessageHandler = std::function<void(const std::string& text, UniqueFd fd)>;

  DescriptorChannel(boost::asio::io_context& io, UniqueFd socket);
  ~DescriptorChannel() { close(); }
  DescriptorChannel(const DescriptorChannel&) = delete;
  DescriptorChannel& operator=(const DescriptorChannel&) = delete;

  // A message without a descriptor comes with an empty `fd`.
  void start(MessageHandler on_message);
  void set_handler(MessageHandler on_message);
  void send(std::string text, UniqueFd fd);
  void close();
  [[nodiscard]] std::optional<pid_t> peer_pid();

 private:
  struct Message {
    std::string text;
    UniqueFd fd;
  };
  void read_next();
  bool read_one();  // false: nothing more now, or closed
  void write_ready();
  [[nodiscard]] bool write_one(const Message& message);
  void write_later();

  boost::asio::posix::stream_descriptor socket_;
  boost::asio::steady_timer retry_;
  ForkGuard guard_;
  bool open_ = true;
  bool writing_ = false;
  std::shared_ptr<MessageHandler> on_message_;
  std::deque<Message> queue_;
};

}  // namespace hsdp::comm
