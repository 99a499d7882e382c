#include "hsdp/comm/control/process_watch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "hsdp/comm/descriptor_limit.h"

namespace hsdp::comm {
namespace asio = boost::asio;
using boost::system::error_code;

struct ProcessWatch::State : std::enable_shared_from_this<State> {
  State(asio::io_context& io, pid_t process, std::function<void()> handler)
      : pid(process), descriptor(io), timer(io), on_end(std::move(handler)) {}

  void open() {
    constexpr std::chrono::milliseconds kBetweenAttempts{100};
    const auto pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
    if (pidfd < 0) {
      if (is_descriptor_limit(errno)) after(kBetweenAttempts, [this] { open(); });
      return;
    }
    guard = ForkGuard(pidfd);
    descriptor.assign(pidfd);
    descriptor.async_wait(asio::posix::stream_descriptor::wait_read,
                          [self = shared_from_this()](error_code error) {
                            if (!error) self->ended();
                          });
  }

  // Its connections end now, too, unless a child holds them; what they carried counts first.
  void ended() {
    constexpr std::chrono::milliseconds kForConnections{500};
    after(kForConnections, [this] {
      if (on_end) std::exchange(on_end, nullptr)();
    });
  }

  void after(std::chrono::milliseconds pause, std::function<void()> next) {
    timer.expires_after(pause);
    timer.async_wait([self = shared_from_this(), next = std::move(next)](error_code stopped) {
      if (!stopped && !self->is_closed) next();
    });
  }

  pid_t pid;
  asio::posix::stream_descriptor descriptor;
  asio::steady_timer timer;
  ForkGuard guard;
  std::function<void()> on_end;
  bool is_closed = false;
};

ProcessWatch::ProcessWatch(asio::io_context& io, pid_t pid, std::function<void()> on_end)
    : state_(std::make_shared<State>(io, pid, std::move(on_end))) {
  state_->open();
}

ProcessWatch::~ProcessWatch() {
  state_->is_closed = true;
  state_->on_end = nullptr;
  state_->guard.release();
  error_code ignored;
  state_->descriptor.close(ignored);
  state_->timer.cancel();
}

}  // namespace hsdp::comm
