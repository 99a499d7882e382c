// Rank 0's door: accepts connections, has strangers prove the secret (TCP), reads one bounded join
// message, and hands over only those who got that far.
//
// Lives on the I/O thread. Peers are handled side by side and against size limits. A stranger has
// until a deadline to prove the secret; when there are too many strangers the oldest is dropped, so
// that they cannot keep ranks out (a rank that is dropped so tries again).
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <string>

#include "hsdp/comm/control/control_frames.h"
#include "hsdp/comm/control/control_link.h"

namespace hsdp::comm {

class JoinListener {
 public:
  using JoinHandler = std::function<void(std::shared_ptr<ControlLink>, const JoinFrame&)>;

  static constexpr std::ptrdiff_t kMaxStrangers = 64;

  // `listener` is non-blocking and stays the caller's. An empty secret: no proof (Unix socket).
  JoinListener(boost::asio::io_context& io, int listener, std::string secret,
               std::chrono::milliseconds proof_deadline, JoinHandler on_join);
  ~JoinListener();
  JoinListener(const JoinListener&) = delete;
  JoinListener& operator=(const JoinListener&) = delete;

 private:
  class Pending;
  void accept_next();
  void accept_ready();
  void admit(UniqueFd socket);
  void forget(const std::shared_ptr<Pending>& pending);

  boost::asio::io_context& io_;
  boost::asio::posix::stream_descriptor listener_;
  boost::asio::steady_timer retry_;
  std::string secret_;
  std::chrono::milliseconds proof_deadline_;
  JoinHandler on_join_;
  std::list<std::shared_ptr<Pending>> pending_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

// What both sides bind into the proof of a control connection.
constexpr const char* kControlContext = "hsdp control connection";

}  // namespace hsdp::comm
