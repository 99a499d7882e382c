// Tells when a process of this host ends, even while a forked child of it keeps its sockets open.
//
// Lives on the I/O thread. Where the kernel has no pidfd, or the process is not visible from here,
// it watches nothing, and the connection's end is all there is. At the limit of open files it tries
// again until it gets a descriptor.
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
  // `on_end` is called once, a moment after the end: what the process had sent is read first.
  ProcessWatch(boost::asio::io_context& io, pid_t pid, std::function<void()> on_end);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace hsdp::comm
