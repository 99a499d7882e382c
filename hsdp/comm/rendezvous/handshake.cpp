#include "hsdp/comm/rendezvous/handshake.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>

#include "hsdp/comm/rendezvous/secret_proof.h"

namespace hsdp::comm {
namespace {

using Clock = std::chrono::steady_clock;

class NonBlocking {
 public:
  explicit NonBlocking(int socket) : socket_(socket), flags_(::fcntl(socket, F_GETFL)) {
    ::fcntl(socket_, F_SETFL, flags_ | O_NONBLOCK);
  }
  ~NonBlocking() { ::fcntl(socket_, F_SETFL, flags_); }
  NonBlocking(const NonBlocking&) = delete;
  NonBlocking& operator=(const NonBlocking&) = delete;

 private:
  int socket_;
  int flags_;
};

bool wait_for(int socket, short events, Clock::time_point end) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    pollfd ready{socket, events, 0};
    const int n = ::poll(
        &ready, 1, static_cast<int>(std::min<std::int64_t>(left, std::numeric_limits<int>::max())));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
  }
}

bool would_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

bool send_all(int socket, std::span<const std::uint8_t> bytes, Clock::time_point end) {
  while (!bytes.empty()) {
    const ssize_t n = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n > 0) bytes = bytes.subspan(static_cast<std::size_t>(n));
    if (n < 0 && (!would_wait() || !wait_for(socket, POLLOUT, end))) return false;
  }
  return true;
}

bool receive_all(int socket, std::span<std::uint8_t> bytes, Clock::time_point end) {
  while (!bytes.empty()) {
    const ssize_t n = ::recv(socket, bytes.data(), bytes.size(), 0);
    if (n == 0) return false;
    if (n > 0) bytes = bytes.subspan(static_cast<std::size_t>(n));
    if (n < 0 && (!would_wait() || !wait_for(socket, POLLIN, end))) return false;
  }
  return true;
}

}  // namespace

bool prove_secret(int socket, HandshakeRole role, const std::string& secret,
                  const std::string& context, std::chrono::milliseconds deadline) {
  const NonBlocking mode(socket);
  const Clock::time_point end = Clock::now() + deadline;
  SecretProof proof(role, secret, context);
  std::array<std::uint8_t, SecretProof::kMaxFrameBytes> frame{};
  for (;;) {
    switch (proof.step()) {
      case SecretProof::Step::kProven:
        return true;
      case SecretProof::Step::kRefused:
        return false;
      case SecretProof::Step::kSend:
        if (!send_all(socket, proof.outgoing(), end)) return false;
        proof.sent();
        break;
      case SecretProof::Step::kReceive: {
        const std::span<std::uint8_t> bytes(frame.data(), proof.expected_bytes());
        if (!receive_all(socket, bytes, end)) return false;
        proof.received(bytes);
        break;
      }
    }
  }
}

}  // namespace hsdp::comm
