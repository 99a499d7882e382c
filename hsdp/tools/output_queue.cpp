#include "hsdp/tools/output_queue.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace hsdp::tools {
namespace {

// O_NONBLOCK on the descriptor itself would also affect the process that gave it to us. Files never
// block, and a second opening would have a separate offset: leave them alone.
comm::UniqueFd open_non_blocking(int fd) {
  struct stat facts {};
  if (::fstat(fd, &facts) != 0) return {};
  if (!S_ISFIFO(facts.st_mode) && ::isatty(fd) != 1) return {};
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return comm::UniqueFd(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

bool takes_output(int fd) {
  pollfd ready{fd, POLLOUT, 0};
  return ::poll(&ready, 1, 0) > 0;
}

}  // namespace

OutputQueue::OutputQueue(int fd) : fd_(fd), own_(open_non_blocking(fd)) {}

void OutputQueue::push(std::string_view text) {
  if (!closed_) pending_ += text;
}

bool OutputQueue::flush() {
  const std::size_t before = written_;
  // A pipe that is ready takes PIPE_BUF bytes without blocking.
  while (!is_empty() && (own_ || takes_output(fd_))) {
    const std::size_t left = pending_.size() - written_;
    const std::size_t most = own_ ? left : std::min<std::size_t>(left, PIPE_BUF);
    const ssize_t n = ::write(fd(), pending_.data() + written_, most);
    if (n > 0) written_ += static_cast<std::size_t>(n);
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0 && errno != EINTR) {
      closed_ = true;
      written_ = pending_.size();
      break;
    }
  }
  const bool taken = written_ != before;
  // Moving the rest costs time in proportion to its length, so do it rarely.
  if (written_ >= pending_.size() / 2) {
    pending_.erase(0, written_);
    written_ = 0;
  }
  return taken;
}

}  // namespace hsdp::tools
