// The rendezvous: how the ranks of a job find rank 0, and who can pass descriptors to whom.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "hsdp/comm/control/process_control.h"
#include "hsdp/comm/control/verdict.h"
#include "hsdp/comm/control/wire_text.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/rendezvous/handshake.h"
#include "hsdp/comm/rendezvous/host_identity.h"
#include "hsdp/comm/rendezvous/tcp_rendezvous.h"
#include "hsdp/comm/timeout_range.h"
#include "hsdp/comm/world.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using Millis = std::chrono::milliseconds;

// Calls `attempt` until it gives something or the time is over.
template <typename Attempt>
auto retry_until(Clock::time_point end, Attempt attempt) -> decltype(attempt()) {
  constexpr Millis kFirstPause{1};
  constexpr Millis kLongestPause{50};
  for (Millis pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    if (auto result = attempt()) return result;
    if (Clock::now() + pause >= end) return {};
    std::this_thread::sleep_for(pause);
  }
}

[[noreturn]] void throw_hub_absent(const std::string& where, Millis timeout, int rank, int size,
                                   const std::string& detail = {}) {
  throw TimeoutError("rendezvous: rank 0 of " + std::to_string(size) + " did not answer at " +
                         where + " within " + seconds_text(timeout) + detail +
                         "; check that all ranks were started and still run (rank " +
                         std::to_string(rank) + " of " + std::to_string(size) + ")",
                     {0});
}

// The socket of the rank that brokers descriptors on its host.
std::string leader_name(int rank) { return "leader" + std::to_string(rank); }

std::optional<JobSocket> try_to_claim(const std::filesystem::path& path) {
  try {
    return JobSocket::claim(path, SOCK_SEQPACKET);
  } catch (const Error&) {  // no place for a socket: this host's ranks use TCP
    return std::nullopt;
  }
}

// What ranks that died in the rendezvous left behind; what live ranks hold stays. The connections
// of a killed process end a moment before its locks do.
void sweep_dead_sockets(const LaunchEnvironment& launch) {
  constexpr Millis kPatience{500};
  const Clock::time_point end = Clock::now() + kPatience;
  std::vector<std::string> names{"rank0"};
  for (int rank = 0; rank < launch.size; ++rank) names.push_back(leader_name(rank));
  for (const std::string& name : names) {
    const auto path = job_socket_path(launch, name);
    static_cast<void>(retry_until(end, [&] { return sweep_job_socket(path); }));
  }
}

}  // namespace

ProcessControl::ProcessControl(const LaunchEnvironment& launch, std::chrono::milliseconds timeout)
    : rank_(launch.rank),
      size_(launch.size),
      timeout_(timeout),
      generation_(fork_generation()),
      secret_(launch.secret.value_or("")),
      host_(host_identity()),
      shares_(static_cast<std::size_t>(launch.size), false) {
  if (size_ < 1 || rank_ < 0 || rank_ >= size_) {
    throw UsageError("control: expected a rank below the world size, got rank " +
                     std::to_string(rank_) + " of " + std::to_string(size_));
  }
  require_timeout(timeout_, "control: timeout");
  shares_[static_cast<std::size_t>(rank_)] = true;
  try {
    meet(launch);
  } catch (const PeerLostError&) {
    sweep_dead_sockets(launch);
    throw;
  }
}

void ProcessControl::meet(const LaunchEnvironment& launch) {
  if (size_ == 1) {
    loop_ = std::make_unique<ControlLoop>(state_, own_frame(launch), timeout_);
    loop_->start_as_hub(-1, "", "");
  } else if (launch.one_host()) {
    join_one_host(launch);
  } else {
    join_hosts(launch);
  }
  const WelcomeFrame welcome = state_->await_welcome();
  if (secret_.empty()) secret_ = welcome.secret;
  if (size_ > 1) connect_descriptors(launch, welcome.hosts);
}

JoinFrame ProcessControl::own_frame(const LaunchEnvironment& launch) const {
  JoinFrame frame;
  frame.rank = rank_;
  frame.size = size_;
  frame.restart_count = launch.restart_count;
  frame.job = launch.job;
  frame.host = host_;
  frame.address = address_;
  return frame;
}

void ProcessControl::join_one_host(const LaunchEnvironment& launch) {
  const auto path = job_socket_path(launch, "rank0");
  const Clock::time_point end = Clock::now() + timeout_;
  loop_ = std::make_unique<ControlLoop>(state_, own_frame(launch), timeout_);
  if (rank_ != 0) {
    UniqueFd socket = retry_until(end, [&] { return connect_job_socket(path, SOCK_STREAM); });
    if (!socket) {
      static_cast<void>(sweep_job_socket(path));
      throw_hub_absent(path.string(), timeout_, rank_, size_,
                       launch.local_size ? ""
                                         : " (taken for one host; if it is not, set HSDP_ADDR, "
                                           "HSDP_PORT and HSDP_SECRET)");
    }
    loop_->start_as_rank(std::move(socket));
    static_cast<void>(state_->await_welcome());
    return;
  }
  auto door = retry_until(end, [&] { return JobSocket::claim(path, SOCK_STREAM); });
  if (!door) {
    throw Error("rendezvous: another process is rank 0 of this job (" + path.string() +
                "); end it or set another HSDP_JOB");
  }
  loop_->start_as_hub(door->listener(), "", random_secret());
  try {
    static_cast<void>(state_->await_welcome());
  } catch (...) {
    loop_->stop();  // tells latecomers, while the door is still open
    throw;
  }
  loop_->stop_listening();
}

void ProcessControl::join_hosts(const LaunchEnvironment& launch) {
  require_tcp_settings(launch);
  const std::string where = *launch.address + ":" + std::to_string(*launch.port);
  const Clock::time_point end = Clock::now() + timeout_;
  if (rank_ != 0) {
    bool was_refused = false;
    UniqueFd socket = retry_until(end, [&]() -> UniqueFd {
      const auto left = std::chrono::ceil<Millis>(end - Clock::now());
      return connect_tcp_hub(*launch.address, *launch.port, secret_, left, was_refused);
    });
    if (!socket) {
      throw_hub_absent(where, timeout_, rank_, size_,
                       was_refused ? " (it answers, but does not prove this job's secret: compare "
                                     "HSDP_SECRET)"
                                   : "");
    }
    bound_dead_link(socket.get(), timeout_);
    address_ = own_address(socket.get());
    loop_ = std::make_unique<ControlLoop>(state_, own_frame(launch), timeout_);
    loop_->start_as_rank(std::move(socket));
    static_cast<void>(state_->await_welcome());
    return;
  }
  const UniqueFd door = listen_tcp_hub(*launch.address, *launch.port);
  const ForkGuard guard(door.get());
  address_ = own_address(door.get());
  loop_ = std::make_unique<ControlLoop>(state_, own_frame(launch), timeout_);
  loop_->start_as_hub(door.get(), secret_, "");
  try {
    static_cast<void>(state_->await_welcome());
  } catch (...) {
    loop_->stop();
    throw;
  }
  loop_->stop_listening();
}

// Ranks with one host identity meet at the lowest of them, which brokers; who cannot reach it
// (other mount namespace) shares memory with nobody.
void ProcessControl::connect_descriptors(const LaunchEnvironment& launch,
                                         const std::vector<std::string>& hosts) {
  std::vector<int> everyone;
  std::vector<int> local_ranks;
  for (int rank = 0; rank < size_; ++rank) {
    everyone.push_back(rank);
    if (hosts[static_cast<std::size_t>(rank)] == host_) local_ranks.push_back(rank);
  }
  const int leader = local_ranks.front();
  const bool leads = leader == rank_ && local_ranks.size() > 1;
  const WaitState waiting{"rendezvous"};
  const auto own_path = job_socket_path(launch, leader_name(rank_));
  auto door = leads ? try_to_claim(own_path) : std::nullopt;
  const auto paths =
      exchange("hsdp leader paths", everyone, door ? own_path.string() : "", waiting);
  const std::string& leader_path = paths[static_cast<std::size_t>(leader)];
  bool reaches = door.has_value();
  if (!leads && !leader_path.empty()) {
    UniqueFd socket;
    try {
      socket = connect_job_socket(leader_path, SOCK_SEQPACKET);
    } catch (const Error&) {  // not visible from here
    }
    reaches = static_cast<bool>(socket);
    if (reaches) loop_->follow_descriptors(std::move(socket), leader);
  }
  const auto reached = exchange("hsdp leader reach", everyone, reaches ? "yes" : "no", waiting);
  if (door) loop_->lead_descriptors(door->take_listener(), local_ranks);
  for (const int rank : local_ranks) {
    const bool both = reaches && reached[static_cast<std::size_t>(rank)] == "yes";
    if (both) shares_[static_cast<std::size_t>(rank)] = true;
  }
}

std::shared_ptr<Control> connect_control(const LaunchEnvironment& launch,
                                         std::chrono::milliseconds timeout) {
  return std::make_shared<ProcessControl>(launch, timeout);
}

}  // namespace hsdp::comm
