#include "hsdp/comm/host/tcp_channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/host/host_wait.h"
#include "hsdp/error.h"

namespace hsdp::comm {

std::size_t tcp_message_bytes(int size) {
  constexpr std::size_t kLargest = std::size_t{256} << 10;
  constexpr std::size_t kLine = 64;  // whole cache lines, so whole elements
  const std::size_t messages = 2 * (static_cast<std::size_t>(size) - 1) + kStagedMessages;
  return std::min(kLargest, kTcpBufferBytes / messages / kLine * kLine);
}

TcpChannel::TcpChannel(UniqueFd socket, std::size_t message_bytes, TcpPeer peer)
    : socket_(std::move(socket)),
      fork_guard_(socket_.get()),
      generation_(fork_generation()),
      message_bytes_(message_bytes),
      peer_(peer) {}

TcpChannel::~TcpChannel() {
  fork_guard_.release();
  // In a forked child the descriptor is already closed, and its number may have been reused.
  if (generation_ != fork_generation()) static_cast<void>(socket_.release());
}

bool TcpChannel::write(const std::byte* data, std::size_t size, std::size_t& done) {
  while (done < size) {
    if (write_blocked_) return false;
    const ssize_t count = ::send(socket_.get(), data + done, size - done, MSG_NOSIGNAL);
    if (count >= 0) {
      done += static_cast<std::size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      write_blocked_ = true;
    } else if (errno != EINTR) {
      lose(std::generic_category().message(errno));
    }
  }
  return true;
}

bool TcpChannel::read(std::byte* data, std::size_t size, std::size_t& done) {
  while (done < size) {
    if (read_blocked_) return false;
    const ssize_t count = ::recv(socket_.get(), data + done, size - done, 0);
    if (count > 0) {
      done += static_cast<std::size_t>(count);
    } else if (count == 0) {
      lose("it closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      read_blocked_ = true;
    } else if (errno != EINTR) {
      lose(std::generic_category().message(errno));
    }
  }
  return true;
}

void TcpChannel::lose(const std::string& reason) {
  // A peer that left because the world ended has told Control why; report that reason first
  // [Note: dead links].
  wait_for_verdict(peer_.control, std::chrono::seconds(1));
  throw_if_failed(peer_.control, peer_.waiting);
  end_world(peer_.control,
            {.kind = FailureKind::kPeerLost,
             .message = operation_text(peer_.waiting.operation, peer_.waiting.bucket) + ": " +
                        ranks_text({peer_.world_rank}, peer_.control.size()) + " was lost (" +
                        reason + "); save what you need and restart the job",
             .ranks = {peer_.world_rank}},
            peer_.waiting);
}

bool TcpChannel::flush() {
  if (committed_ == 0) return true;
  if (!write(outgoing_.data(), committed_, sent_)) return false;
  committed_ = 0;
  sent_ = 0;
  return true;
}

std::byte* TcpChannel::reserve() {
  if (!flush()) return nullptr;
  outgoing_.resize(message_bytes_);
  return outgoing_.data();
}

void TcpChannel::commit(std::size_t size) {
  committed_ = size;
  static_cast<void>(flush());
}

bool TcpChannel::send(const std::byte* data, std::size_t size) {
  if (!flush() || !write(data, size, sent_)) return false;
  sent_ = 0;
  return true;
}

const std::byte* TcpChannel::front(std::size_t size) {
  if (incoming_.empty()) incoming_.resize(message_bytes_);
  return received_ == size || read(incoming_.data(), size, received_) ? incoming_.data() : nullptr;
}

bool TcpChannel::receive(std::byte* data, std::size_t size) {
  if (!read(data, size, received_)) return false;
  received_ = 0;
  return true;
}

}  // namespace hsdp::comm
