#include "hsdp/comm/host/tcp_handshake.h"

#include <sys/socket.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace hsdp::comm {

TcpHandshake::TcpHandshake(UniqueFd socket, int own_rank, SecretProof proof)
    : socket_(std::move(socket)),
      fork_guard_(socket_.get()),
      proof_(std::move(proof)),
      hello_{.magic = Hello::kMagic, .caller = static_cast<std::uint32_t>(own_rank)},
      events_(POLLOUT) {}

TcpHandshake::TcpHandshake(UniqueFd socket, ProofFor proof_for)
    : socket_(std::move(socket)), fork_guard_(socket_.get()), proof_for_(std::move(proof_for)) {}

UniqueFd TcpHandshake::take_socket() {
  fork_guard_.release();
  return std::move(socket_);
}

TcpHandshake::State TcpHandshake::advance() {
  if (!greeted_) greeted_ = greet();
  while (greeted_ && state_ == State::kWaiting) {
    switch (proof_->step()) {
      case SecretProof::Step::kSend:
        if (!send(proof_->outgoing())) return state_;
        proof_->sent();
        break;
      case SecretProof::Step::kReceive: {
        const std::span<std::uint8_t> frame(frame_.data(), proof_->expected_bytes());
        if (!receive(frame)) return state_;
        proof_->received(frame);
        break;
      }
      case SecretProof::Step::kProven:
        state_ = State::kProven;
        break;
      case SecretProof::Step::kRefused:
        break_off("it did not prove the job's secret");
        break;
    }
  }
  return state_;
}

bool TcpHandshake::greet() {
  auto* const bytes = reinterpret_cast<std::uint8_t*>(&hello_);
  if (proof_for_ == nullptr) return send({bytes, sizeof hello_});
  if (!receive({bytes, sizeof hello_})) return false;
  if (hello_.magic == Hello::kMagic) proof_ = proof_for_(caller());
  if (!proof_) break_off("no such rank is expected here");
  return proof_.has_value();
}

template <typename Byte, typename Move>
bool TcpHandshake::move_all(std::span<Byte> frame, Move move, short events) {
  while (done_ < frame.size()) {
    const std::span<Byte> rest = frame.subspan(done_);
    const ssize_t count = move(socket_.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) break_off("it closed the connection before it proved the job's secret");
    if (count < 0) wait_or_break(events);
    if (count <= 0) return false;
    done_ += static_cast<std::size_t>(count);
  }
  done_ = 0;
  return true;
}

bool TcpHandshake::send(std::span<const std::uint8_t> frame) {
  return move_all(frame, ::send, POLLOUT);
}

bool TcpHandshake::receive(std::span<std::uint8_t> frame) {
  return move_all(frame, ::recv, POLLIN);
}

void TcpHandshake::wait_or_break(short events) {
  events_ = events;
  if (errno != EAGAIN && errno != EWOULDBLOCK) break_off(std::generic_category().message(errno));
}

void TcpHandshake::break_off(std::string problem) {
  state_ = State::kBroken;
  problem_ = std::move(problem);
}

}  // namespace hsdp::comm
