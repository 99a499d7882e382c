// A channel over one TCP connection.
//
// Owns the socket. Reads and writes on the calling thread, without blocking; data in flight waits
// in the kernel's buffers. After a socket could not continue, it is not tried until look_again()
// [Note: links at the first call].
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/host/channel.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

// The message size for every rank of a group of `size`. One whole message per direction and
// channel, plus the messages that a reduction stages, then take at most kTcpBufferBytes.
constexpr std::size_t kTcpBufferBytes = std::size_t{16} << 20;
constexpr std::size_t kStagedMessages = 5;
[[nodiscard]] std::size_t tcp_message_bytes(int size);

struct TcpPeer {
  Control& control;
  int world_rank;
  const WaitState& waiting;  // the group's call, for error messages; must outlive the channel
};

class TcpChannel : public Channel {
 public:
  TcpChannel(UniqueFd socket, std::size_t message_bytes, TcpPeer peer);
  TcpChannel(const TcpChannel&) = delete;
  TcpChannel& operator=(const TcpChannel&) = delete;
  ~TcpChannel() override;

  [[nodiscard]] std::byte* reserve() override;
  void commit(std::size_t size) override;
  [[nodiscard]] bool send(const std::byte* data, std::size_t size) override;
  [[nodiscard]] bool flush() override;
  [[nodiscard]] const std::byte* front(std::size_t size) override;
  void pop() override { received_ = 0; }
  [[nodiscard]] bool receive(std::byte* data, std::size_t size) override;

  [[nodiscard]] int socket() const { return socket_.get(); }
  // Whether the socket may continue in each direction.
  struct Moved {
    bool read = false;
    bool write = false;
  };
  void look_again(Moved moved) {
    read_blocked_ = read_blocked_ && !moved.read;
    write_blocked_ = write_blocked_ && !moved.write;
  }

 private:
  // Advances `done` towards `size`; true when it gets there.
  bool write(const std::byte* data, std::size_t size, std::size_t& done);
  bool read(std::byte* data, std::size_t size, std::size_t& done);
  [[noreturn]] void lose(const std::string& reason);

  UniqueFd socket_;
  ForkGuard fork_guard_;
  std::uint32_t generation_;
  std::size_t message_bytes_;
  TcpPeer peer_;
  std::vector<std::byte> outgoing_;  // a committed message: `sent_` of `committed_` bytes are sent
  std::vector<std::byte> incoming_;
  std::size_t committed_ = 0;
  std::size_t sent_ = 0;
  std::size_t received_ = 0;
  bool write_blocked_ = false;
  bool read_blocked_ = false;
};

}  // namespace hsdp::comm
