#include "hsdp/comm/control/control_link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <utility>

#include "hsdp/comm/control/wire_text.h"

namespace hsdp::comm {
namespace asio = boost::asio;
using boost::system::error_code;

namespace {

int family_of(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);  // NOLINT
  return address.ss_family;
}

void set_option(int socket, int level, int name, int value) {
  ::setsockopt(socket, level, name, &value, sizeof value);
}

}  // namespace

ControlLink::ControlLink(asio::io_context& io, UniqueFd socket)
    : socket_(io), guard_(socket.get()) {
  const int family = family_of(socket.get());
  is_unix_ = family == AF_UNIX;
  socket_.assign(asio::generic::stream_protocol(family, 0), socket.get());
  static_cast<void>(socket.release());
}

ControlLink::~ControlLink() { close(); }

void ControlLink::bound_dead_link(std::chrono::milliseconds timeout) {
  if (is_unix_) return;
  const int socket = socket_.native_handle();
  const auto limit = std::min(timeout, std::chrono::milliseconds(30'000));
  const int seconds =
      std::max(1, static_cast<int>(std::chrono::floor<std::chrono::seconds>(limit).count()));
  constexpr int kProbeCount = 3;
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds / 2));
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, seconds / (2 * kProbeCount)));
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbeCount);
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(limit.count()));
}

void ControlLink::start(Handlers handlers, std::size_t max_body_bytes) {
  set_handlers(std::move(handlers));
  max_body_bytes_ = max_body_bytes;
  read_header();
}

void ControlLink::set_handlers(Handlers handlers) {
  handlers_ = std::make_shared<Handlers>(std::move(handlers));
}

void ControlLink::count_in(ControlTraffic& traffic, int peer) {
  traffic_ = &traffic;
  peer_ = peer;
}

void ControlLink::send(FrameBytes frame) {
  if (!open_ || finishing_) return;
  if (traffic_ != nullptr && type_of(*frame) != FrameType::kBeat) {
    traffic_->add_sent(peer_, frame->size());
  }
  queue_.push_back(std::move(frame));
  if (queue_.size() == 1) write_next();
}

void ControlLink::finish_sending() {
  if (!open_ || finishing_) return;
  finishing_ = true;
  error_code ignored;
  if (queue_.empty()) socket_.shutdown(asio::socket_base::shutdown_send, ignored);
}

void ControlLink::close() {
  if (!open_) return;
  open_ = false;
  guard_.release();
  error_code ignored;
  socket_.close(ignored);
  // Handlers may hold this link and may be running now.
  handlers_ = std::make_shared<Handlers>();
  queue_.clear();
}

std::optional<pid_t> ControlLink::peer_pid() const {
  if (!is_unix_ || !open_) return std::nullopt;
  ucred peer{};
  socklen_t length = sizeof peer;
  auto& socket = const_cast<ControlLink*>(this)->socket_;  // native_handle() is not const
  if (::getsockopt(socket.native_handle(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) {
    return std::nullopt;
  }
  return peer.pid > 0 ? std::optional<pid_t>(peer.pid) : std::nullopt;
}

void ControlLink::read_header() {
  asio::async_read(socket_, asio::buffer(header_),
                   [self = shared_from_this()](error_code error, std::size_t) {
                     if (error) return self->broke(error.message());
                     WireReader in({self->header_.data(), self->header_.size() - 1});
                     const std::size_t size = in.u32();
                     if (size > self->max_body_bytes_)
                       return self->broke("it sent a message beyond all bounds");
                     self->body_.resize(size);
                     self->read_body(static_cast<FrameType>(self->header_.back()), 0);
                   });
}

void ControlLink::read_body(FrameType type, std::size_t begin) {
  constexpr std::size_t kPieceBytes = 1U << 20U;
  const std::size_t size = std::min(body_.size() - begin, kPieceBytes);
  asio::async_read(
      socket_, asio::buffer(body_.data() + begin, size),
      [self = shared_from_this(), type, end = begin + size](error_code error, std::size_t) {
        if (error) return self->broke(error.message());
        const auto handlers = self->handlers_;
        if (end < self->body_.size()) {
          if (handlers->on_progress) handlers->on_progress();
          if (self->open_) self->read_body(type, end);
          return;
        }
        if (self->traffic_ != nullptr && type != FrameType::kBeat) {
          self->traffic_->add_received(self->peer_, kFrameHeaderBytes + end);
        }
        if (handlers->on_frame) handlers->on_frame(type, self->body_);
        constexpr std::size_t kKeptBytes = 64U << 10U;
        if (self->body_.capacity() > kKeptBytes) self->body_ = {};
        if (self->open_) self->read_header();
      });
}

void ControlLink::write_next() {
  asio::async_write(socket_, asio::buffer(*queue_.front()),
                    [self = shared_from_this()](error_code error, std::size_t) {
                      if (!self->open_) return;
                      if (error) {
                        // Read what the peer sent before it left; the reading side then reports the
                        // end.
                        self->queue_.clear();
                        self->finishing_ = true;
                        return;
                      }
                      self->queue_.pop_front();
                      error_code ignored;
                      if (!self->queue_.empty()) {
                        self->write_next();
                      } else if (self->finishing_) {
                        self->socket_.shutdown(asio::socket_base::shutdown_send, ignored);
                      }
                    });
}

void ControlLink::broke(const std::string& reason) {
  if (!open_) return;
  const auto handlers = handlers_;
  close();
  if (handlers->on_closed) handlers->on_closed(reason);
}

}  // namespace hsdp::comm
