// Where a rank waits for the sockets of its group: one epoll set, which also tells each channel
// whether its socket is worth a system call. Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>

#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/host/host_wait.h"
#include "hsdp/comm/host/tcp_channel.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

class SocketWaiter : public Waiter {
 public:
  // Rings have no descriptor: if the group also has rings (`rings_too`), sleeps are short.
  SocketWaiter(Bell& bell, bool rings_too) : Waiter(bell), rings_too_(rings_too) {}
  SocketWaiter(const SocketWaiter&) = delete;
  SocketWaiter& operator=(const SocketWaiter&) = delete;
  ~SocketWaiter() override;

  // The channel must outlive every later look and sleep.
  void add(TcpChannel& channel);
  // Tells the channels what has arrived.
  void look() { look(std::chrono::milliseconds(0)); }
  void sleep(std::uint32_t seen, std::chrono::milliseconds at_most) override;

 private:
  void look(std::chrono::milliseconds at_most);

  bool rings_too_;
  UniqueFd epoll_;  // opened for the first channel
  ForkGuard fork_guard_;
  std::uint32_t generation_ = fork_generation();
};

}  // namespace hsdp::comm
