// Rank 0's door: accepts connections, has strangers prove the secret (TCP), reads one bounded join
// message, and hands over only those who got that far.
//
// Lives on the I/O thread. Peers are handled side by side and against size limits. A stranger has
// until a deadline to prove the secret; who has proven it is never dropped. There is room for all
// ranks at once and kMaxStrangers more; when that is full a stranger makes room, the oldest that
// has said nothing, so that strangers cannot keep ranks out (a rank that is dropped so tries
// again) [Note: the door]. At the limit of open files, connections wait in the kernel's queue.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <set>
#include <string>

#include "hsdp/comm/control/control_frames.h"
#include "hsdp/comm/control/control_link.h"

namespace hsdp::comm {

class JoinListener {
 public:
  static constexpr std::ptrdiff_t kMaxStrangers = 64;

  struct Options {
    std::string secret;  // empty: no proof (Unix socket)
    std::chrono::milliseconds proof_deadline;
    int rank_count;  // how many ranks are expected
  };
  struct Handlers {
    std::function<void(std::shared_ptr<ControlLink>, const JoinFrame&)> on_join;
    std::function<void()> on_limit;  // the limit of open files was met; it tries again
  };

  // `listener` is non-blocking and stays the caller's.
  JoinListener(boost::asio::io_context& io, int listener, Options options, Handlers handlers);
  ~JoinListener();
  JoinListener(const JoinListener&) = delete;
  JoinListener& operator=(const JoinListener&) = delete;

  // Where ranks of hsdp called from that have another secret; not all, if they are many.
  [[nodiscard]] const std::set<std::string>& unproven() const { return unproven_; }

 private:
  class Pending;
  void accept_next();
  void accept_ready();
  void admit(UniqueFd socket);
  void make_room();
  void forget(const std::shared_ptr<Pending>& pending);

  boost::asio::io_context& io_;
  boost::asio::posix::stream_descriptor listener_;
  boost::asio::steady_timer retry_;
  Options options_;
  Handlers handlers_;
  std::list<std::shared_ptr<Pending>> pending_;
  std::set<std::string> unproven_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

// What both sides bind into the proof of a control connection.
constexpr const char* kControlContext = "hsdp control connection";

}  // namespace hsdp::comm
