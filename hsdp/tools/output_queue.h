// Output waiting to be written to one of our own streams, whose reader may be slow or gone.
//
// No call waits for the reader. SIGPIPE must be ignored. Not thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "hsdp/comm/unique_fd.h"

namespace hsdp::tools {

class OutputQueue {
 public:
  // The caller keeps `fd` and leaves it open while the queue lives.
  explicit OutputQueue(int fd);

  void push(std::string_view text);
  // Writes what the reader takes now; returns whether it took anything.
  bool flush();

  // Poll it for POLLOUT while the queue is not empty.
  [[nodiscard]] int fd() const { return own_ ? own_.get() : fd_; }
  [[nodiscard]] bool is_empty() const { return written_ == pending_.size(); }
  // Then push only what cannot be postponed.
  [[nodiscard]] bool is_full() const { return pending_.size() - written_ >= kEnoughBytes; }
  // The reader is gone; further output is dropped.
  [[nodiscard]] bool is_closed() const { return closed_; }

 private:
  static constexpr std::size_t kEnoughBytes = std::size_t{1} << 18U;

  int fd_;
  comm::UniqueFd own_;  // the same pipe or terminal, opened non-blocking
  std::string pending_;
  std::size_t written_ = 0;  // bytes of `pending_`
  bool closed_ = false;
};

}  // namespace hsdp::tools
