// Reports the end of a process of this host, even while a forked child of it keeps its sockets
// open.
//
// Lives on the I/O thread. Without a pidfd in the kernel, or if the process is not visible from
// here, it watches nothing; the connection's end must do. At the limit of open files it retries.
#pragma once

#include <sys/types.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>

#include "hsdp/comm/fork_guard.h"

namespace hsdp::comm {

class ProcessWatch {
 public:
  // Calls `on_end` once, shortly after the end, so that what the process sent is read first.
  ProcessWatch(boost::asio::io_context& io, pid_t pid, std::function<void()> on_end);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace hsdp::comm
