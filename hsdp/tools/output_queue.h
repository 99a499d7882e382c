// What waits to be written to one of our own streams, whose reader may be slow, stalled or gone.
//
// No call waits for the reader. SIGPIPE must be ignored. One thread at a time.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "hsdp/comm/unique_fd.h"

namespace hsdp::tools {

class OutputQueue {
 public:
  // Stays the caller's; open as long as the queue lives.
  explicit OutputQueue(int fd);

  void push(std::string_view text);
  // Writes what the reader takes now; whether it took anything.
  bool flush();

  // To be polled for POLLOUT while the queue is not empty.
  [[nodiscard]] int fd() const { return own_ ? own_.get() : fd_; }
  [[nodiscard]] bool is_empty() const { return written_ == pending_.size(); }
  // Nothing should be pushed but what cannot be put off.
  [[nodiscard]] bool is_full() const { return pending_.size() - written_ >= kEnoughBytes; }
  // The reader is gone; what is pushed is dropped.
  [[nodiscard]] bool is_closed() const { return closed_; }

 private:
  static constexpr std::size_t kEnoughBytes = std::size_t{1} << 18U;

  int fd_;
  comm::UniqueFd own_;  // the same pipe or terminal, but non-blocking
  std::string pending_;
  std::size_t written_ = 0;  // bytes of `pending_`
  bool closed_ = false;
};

}  // namespace hsdp::tools
