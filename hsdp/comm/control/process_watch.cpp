#include "hsdp/comm/control/process_watch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <utility>

namespace hsdp::comm {
namespace asio = boost::asio;
using boost::system::error_code;

struct ProcessWatch::State {
  State(asio::io_context& io, std::function<void()> handler)
      : descriptor(io), timer(io), on_end(std::move(handler)) {}
  asio::posix::stream_descriptor descriptor;
  asio::steady_timer timer;
  ForkGuard guard;
  std::function<void()> on_end;
};

ProcessWatch::ProcessWatch(asio::io_context& io, pid_t pid, std::function<void()> on_end)
    : state_(std::make_shared<State>(io, std::move(on_end))) {
  const auto pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) return;
  state_->guard = ForkGuard(pidfd);
  state_->descriptor.assign(pidfd);
  state_->descriptor.async_wait(asio::posix::stream_descriptor::wait_read,
                                [state = state_](error_code error) {
                                  if (error) return;
                                  // Its connections end now too, unless a child holds them: what
                                  // came that way comes first.
                                  constexpr std::chrono::milliseconds kForConnections{500};
                                  state->timer.expires_after(kForConnections);
                                  state->timer.async_wait([state](error_code stopped) {
                                    if (!stopped && state->on_end)
                                      std::exchange(state->on_end, nullptr)();
                                  });
                                });
}

ProcessWatch::~ProcessWatch() {
  state_->on_end = nullptr;
  state_->guard.release();
  error_code ignored;
  state_->descriptor.close(ignored);
  state_->timer.cancel();
}

}  // namespace hsdp::comm
