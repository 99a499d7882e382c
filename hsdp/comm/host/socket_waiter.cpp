#include "hsdp/comm/host/socket_waiter.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <system_error>

namespace hsdp::comm {

SocketWaiter::~SocketWaiter() {
  fork_guard_.release();
  // In a forked child the descriptor is already closed, and its number may have been reused.
  if (generation_ != fork_generation()) static_cast<void>(epoll_.release());
}

void SocketWaiter::add(TcpChannel& channel) {
  if (!epoll_) {
    epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
    fork_guard_ = ForkGuard(epoll_.get());
  }
  epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data = {.ptr = &channel}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, channel.socket(), &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "tcp: epoll");
  }
}

void SocketWaiter::look(std::chrono::milliseconds at_most) {
  std::array<epoll_event, 64> events;
  auto limit = static_cast<int>(at_most.count());
  for (;;) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), int{events.size()}, limit);
    for (const epoll_event& event :
         std::span(events).first(static_cast<std::size_t>(std::max(0, count)))) {
      constexpr std::uint32_t kBroken = EPOLLERR | EPOLLHUP;
      static_cast<TcpChannel*>(event.data.ptr)
          ->look_again({.read = (event.events & (EPOLLIN | EPOLLRDHUP | kBroken)) != 0,
                        .write = (event.events & (EPOLLOUT | kBroken)) != 0});
    }
    if (count < int{events.size()}) return;
    limit = 0;
  }
}

void SocketWaiter::sleep(std::uint32_t /*seen*/, std::chrono::milliseconds at_most) {
  constexpr std::chrono::milliseconds kWithRings{2};
  look(rings_too_ ? std::min(at_most, kWithRings) : at_most);
}

}  // namespace hsdp::comm
