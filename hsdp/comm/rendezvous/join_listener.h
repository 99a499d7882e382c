// Rank 0's door: accepts connections, makes strangers prove the secret (TCP), reads one bounded
// join message, and passes on only connections that got that far.
//
// Lives on the I/O thread. Handles peers side by side, within size limits. A stranger must prove
// the secret by a deadline; a peer that has proven it is never dropped. There is room for all ranks
// and kMaxStrangers more. When it is full, the oldest connection that has said nothing makes room,
// so that strangers cannot keep ranks out; a rank dropped that way tries again [Note: the door]. At
// the limit of open files, connections wait in the kernel's queue.
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
    int rank_count;  // number of expected ranks
  };
  struct Handlers {
    std::function<void(std::shared_ptr<ControlLink>, const JoinFrame&)> on_join;
    std::function<void()> on_limit;  // hit the limit of open files; it will retry
  };

  // `listener` is non-blocking; the caller keeps it.
  JoinListener(boost::asio::io_context& io, int listener, Options options, Handlers handlers);
  ~JoinListener();
  JoinListener(const JoinListener&) = delete;
  JoinListener& operator=(const JoinListener&) = delete;

  // Where hsdp ranks with another secret called from; incomplete if there are many.
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

// The context of the proof for a control connection.
constexpr const char* kControlContext = "hsdp control connection";

}  // namespace hsdp::comm
