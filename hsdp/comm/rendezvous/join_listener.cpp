#include "hsdp/comm/rendezvous/join_listener.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <cerrno>
#include <utility>

#include "hsdp/comm/descriptor_limit.h"
#include "hsdp/comm/rendezvous/secret_proof.h"
#include "hsdp/comm/rendezvous/tcp_rendezvous.h"

namespace hsdp::comm {
namespace asio = boost::asio;
using boost::system::error_code;

// One connection between accept and join.
class JoinListener::Pending : public std::enable_shared_from_this<Pending> {
 public:
  struct Handlers {
    std::function<void(std::shared_ptr<ControlLink>, const JoinFrame&)> on_join;
    std::function<void(int socket)> on_unproven;  // it greeted, but has another secret
    std::function<void(const std::shared_ptr<Pending>&)> on_end;  // joined or not
  };

  Pending(asio::io_context& io, UniqueFd socket, Handlers handlers)
      : io_(io), socket_(io), guard_(socket.get()), timer_(io), handlers_(std::move(handlers)) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);  // NOLINT
    socket_.assign(asio::generic::stream_protocol(address.ss_family, 0), socket.get());
    static_cast<void>(socket.release());
  }

  void start(const std::string& secret, std::chrono::milliseconds deadline) {
    if (secret.empty()) return read_join();
    timer_.expires_after(deadline);
    timer_.async_wait([self = shared_from_this()](error_code error) {
      if (!error && !self->trusted()) self->end();
    });
    proof_ = std::make_unique<SecretProof>(HandshakeRole::kAccepting, secret, kControlContext);
    prove();
  }

  // Whether it proved the secret, or came through a socket that only this user can reach.
  [[nodiscard]] bool trusted() const { return !proof_ || proof_->knows_peer(); }
  [[nodiscard]] bool greeted() const { return trusted() || proof_->is_greeted(); }

  void drop() {
    handlers_ = {};
    timer_.cancel();
    error_code ignored;
    guard_.release();
    socket_.close(ignored);
    if (link_) link_->close();
  }

 private:
  void prove() {
    switch (proof_->step()) {
      case SecretProof::Step::kProven:
        return read_join();
      case SecretProof::Step::kRefused:
        if (proof_->is_greeted() && handlers_.on_unproven) {
          handlers_.on_unproven(socket_.native_handle());
        }
        return end();
      case SecretProof::Step::kSend: {
        const auto bytes = proof_->outgoing();
        return asio::async_write(socket_, asio::buffer(bytes.data(), bytes.size()),
                                 [self = shared_from_this()](error_code error, std::size_t) {
                                   if (error) return self->end();
                                   self->proof_->sent();
                                   self->prove();
                                 });
      }
      case SecretProof::Step::kReceive:
        return asio::async_read(socket_, asio::buffer(frame_, proof_->expected_bytes()),
                                [self = shared_from_this()](error_code error, std::size_t size) {
                                  if (error) return self->end();
                                  self->proof_->received({self->frame_.data(), size});
                                  self->prove();
                                });
    }
  }

  void read_join() {
    if (!socket_.is_open()) return;
    timer_.cancel();
    error_code error;
    guard_.release();
    UniqueFd fd(socket_.release(error));
    if (error) return end();
    link_ = std::make_shared<ControlLink>(io_, std::move(fd));
    ControlLink::Handlers handlers;
    handlers.on_frame = [self = shared_from_this()](FrameType type, std::string_view body) {
      const auto join = type == FrameType::kJoin ? JoinFrame::decode(body) : std::nullopt;
      if (!join) return self->end();
      const auto link = std::move(self->link_);
      const auto on_join = self->handlers_.on_join;
      link->set_handlers({});
      self->end();
      if (on_join) on_join(link, *join);
    };
    handlers.on_closed = [self = shared_from_this()](const std::string&) { self->end(); };
    link_->start(std::move(handlers), kMaxJoinBytes);
  }

  void end() {
    const auto on_end = handlers_.on_end;
    const auto self = shared_from_this();
    drop();
    if (on_end) on_end(self);
  }

  asio::io_context& io_;
  asio::generic::stream_protocol::socket socket_;
  ForkGuard guard_;
  asio::steady_timer timer_;
  Handlers handlers_;
  std::unique_ptr<SecretProof> proof_;
  std::array<std::uint8_t, SecretProof::kMaxFrameBytes> frame_{};
  std::shared_ptr<ControlLink> link_;
};

JoinListener::JoinListener(asio::io_context& io, int listener, Options options, Handlers handlers)
    : io_(io),
      listener_(io, listener),
      retry_(io),
      options_(std::move(options)),
      handlers_(std::move(handlers)) {
  accept_next();
}

JoinListener::~JoinListener() {
  *alive_ = false;
  listener_.release();
  for (const auto& pending : pending_) pending->drop();
}

void JoinListener::accept_next() {
  listener_.async_wait(asio::posix::stream_descriptor::wait_read,
                       [this, alive = alive_](error_code error) {
                         if (!error && *alive) accept_ready();
                       });
}

void JoinListener::accept_ready() {
  constexpr int kMaxAtOnce = 64;
  const auto alive = alive_;
  for (int i = 0; i < kMaxAtOnce && *alive; ++i) {
    UniqueFd socket(
        ::accept4(listener_.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      admit(std::move(socket));
      continue;
    }
    if (is_descriptor_limit(errno) || errno == ENOBUFS || errno == ENOMEM) {
      if (is_descriptor_limit(errno)) handlers_.on_limit();
      retry_.expires_after(std::chrono::milliseconds(50));
      retry_.async_wait([this, alive](error_code error) {
        if (!error && *alive) accept_next();
      });
      return;
    }
    break;
  }
  if (*alive) accept_next();
}

void JoinListener::make_room() {
  const auto is_stranger = [](const auto& pending) { return !pending->trusted(); };
  const auto is_silent = [](const auto& pending) { return !pending->greeted(); };
  const auto count = std::count_if(pending_.begin(), pending_.end(), is_stranger);
  if (count < kMaxStrangers + options_.rank_count) return;
  auto chosen = std::find_if(pending_.begin(), pending_.end(), is_silent);
  if (chosen == pending_.end()) chosen = std::find_if(pending_.begin(), chosen, is_stranger);
  (*chosen)->drop();
  pending_.erase(chosen);
}

void JoinListener::admit(UniqueFd socket) {
  make_room();
  Pending::Handlers handlers;
  handlers.on_join = handlers_.on_join;
  handlers.on_unproven = [this, alive = alive_](int caller) {
    constexpr std::size_t kMostNamed = 8;
    const std::string address = peer_address(caller);
    if (!*alive || address.empty() || unproven_.size() >= kMostNamed) return;
    unproven_.insert(address);
  };
  handlers.on_end = [this, alive = alive_](const std::shared_ptr<Pending>& pending) {
    if (*alive) forget(pending);
  };
  pending_.push_back(std::make_shared<Pending>(io_, std::move(socket), std::move(handlers)));
  const auto pending = pending_.back();
  pending->start(options_.secret, options_.proof_deadline);
}

void JoinListener::forget(const std::shared_ptr<Pending>& pending) { pending_.remove(pending); }

}  // namespace hsdp::comm
