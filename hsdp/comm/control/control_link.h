// One framed control connection over a Unix or TCP socket.
//
// Lives on the I/O thread: every call and callback happens there. send() queues and never blocks. A
// peer that violates the framing or its size limit is treated as one that left.
#pragma once

#include <sys/types.h>

#include <array>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "hsdp/comm/control/control_frames.h"
#include "hsdp/comm/control/control_traffic.h"
#include "hsdp/comm/control/frame_link.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

class ControlLink final : public FrameLink, public std::enable_shared_from_this<ControlLink> {
 public:
  struct Handlers {
    std::function<void(FrameType type, std::string_view body)> on_frame;
    std::function<void(const std::string& reason)> on_closed;  // once, and never after close()
    std::function<void()> on_progress;  // part of a long message arrived: a sign of life
  };

  // Takes a connected stream socket.
  ControlLink(boost::asio::io_context& io, UniqueFd socket);
  ~ControlLink() override;

  void start(Handlers handlers, std::size_t max_body_bytes);
  // Applies from the next frame on.
  void set_max_body_bytes(std::size_t bytes) { max_body_bytes_ = bytes; }
  void set_handlers(Handlers handlers);
  // Counts all further messages in `traffic`, as those of `peer`. `traffic` must outlive the link.
  void count_in(ControlTraffic& traffic, int peer);
  void send(FrameBytes frame) override;
  [[nodiscard]] bool idle() const override { return queue_.empty(); }
  [[nodiscard]] bool open() const override { return open_; }
  void finish_sending() override;
  void close() override;

  // The process at the other end of a Unix socket, if it is visible here.
  [[nodiscard]] std::optional<pid_t> peer_pid() const;
  [[nodiscard]] bool is_unix() const { return is_unix_; }
  // Sets keepalive and TCP_USER_TIMEOUT: a dead link breaks after min(30 s, timeout). Both ends
  // must set them, since each notices only unanswered data that it sent. No effect on Unix sockets.
  void bound_dead_link(std::chrono::milliseconds timeout);

 private:
  void read_header();
  void read_body(FrameType type, std::size_t begin);
  void write_next();
  void broke(const std::string& reason);

  boost::asio::generic::stream_protocol::socket socket_;
  ForkGuard guard_;
  bool is_unix_ = false;
  bool open_ = true;
  bool finishing_ = false;
  std::size_t max_body_bytes_ = 0;
  ControlTraffic* traffic_ = nullptr;
  int peer_ = 0;
  std::shared_ptr<Handlers> handlers_ = std::make_shared<Handlers>();
  std::array<char, kFrameHeaderBytes> header_{};
  std::string body_;
  std::deque<FrameBytes> queue_;
};

}  // namespace hsdp::comm
