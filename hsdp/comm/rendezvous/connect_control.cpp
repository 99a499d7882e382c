// The rendezvous: how a job's ranks find rank 0, and which ranks can pass descriptors.
#include <sys/socket.h>

#include <algorithm>
#include <boost/system/system_error.hpp>
#include <cerrno>
#include <chrono>
#include <exception>
#include <map>
#include <numeric>
#include <string_view>
#include <utility>

#include "hsdp/comm/control/process_control.h"
#include "hsdp/comm/control/wire_text.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/rendezvous/handshake.h"
#include "hsdp/comm/rendezvous/host_identity.h"
#include "hsdp/comm/rendezvous/tcp_rendezvous.h"
#include "hsdp/comm/retry.h"
#include "hsdp/comm/timeout_range.h"
#include "hsdp/comm/world.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using Millis = std::chrono::milliseconds;

Millis left_until(Clock::time_point end) {
  return std::max(Millis(1), std::chrono::ceil<Millis>(end - Clock::now()));
}

[[noreturn]] void throw_hub_absent(const std::string& where, Millis timeout, int rank, int size,
                                   const std::string& detail = {}) {
  throw TimeoutError("rendezvous: rank 0 of " + std::to_string(size) + " did not answer at " +
                         where + " within " + seconds_text(timeout) + detail + " (" +
                         ranks_text({rank}, size) +
                         "); check that all ranks were started and still run",
                     {0});
}

// The socket of the rank that brokers descriptors on its host.
std::string leader_name(int rank) { return "leader" + std::to_string(rank); }

// The socket of a rank through which others speak to rank 0.
std::string relay_name(int rank) { return "relay" + std::to_string(rank); }

std::optional<JobSocket> try_to_claim(const std::filesystem::path& path, int socket_type) {
  try {
    return JobSocket::claim(path, socket_type);
  } catch (const DescriptorLimitError&) {
    throw;
  } catch (const Error&) {  // no place for a socket: this host's ranks use TCP
    return std::nullopt;
  }
}

// Empty if the leader's socket is not visible from here.
UniqueFd try_to_follow(const std::filesystem::path& path, int socket_type, Millis patience) {
  try {
    return connect_job_socket(path, socket_type, patience);
  } catch (const DescriptorLimitError&) {
    throw;
  } catch (const Error&) {
    return {};
  }
}

// Removes the sockets of ranks that died in the rendezvous; live ranks keep theirs. A killed
// process's connections end slightly before its locks do.
void sweep_dead_sockets(const LaunchEnvironment& launch) {
  constexpr Millis kPatience{500};
  const Clock::time_point end = Clock::now() + kPatience;
  std::vector<std::string> names{"rank0"};
  for (int rank = 0; rank < launch.size; ++rank) {
    names.push_back(leader_name(rank));
    names.push_back(relay_name(rank));
  }
  for (const std::string& name : names) {
    const auto path = job_socket_path(launch, name);
    static_cast<void>(retry_until(end, [&] { return sweep_job_socket(path); }));
  }
}

}  // namespace

ProcessControl::ProcessControl(const LaunchEnvironment& launch, std::chrono::milliseconds timeout)
    : RankControl(launch.rank, launch.size, timeout),
      generation_(fork_generation()),
      secret_(launch.secret.value_or("")),
      shares_(static_cast<std::size_t>(std::max(launch.size, 0)), false) {
  if (size() < 1 || rank() < 0 || rank() >= size()) {
    throw UsageError({.where = "control",
                      .expected = "a rank below the world size",
                      .got = "rank " + std::to_string(rank()) + " of " + std::to_string(size())});
  }
  require_timeout(timeout, "control: timeout");
  shares_[static_cast<std::size_t>(rank())] = true;
  try {
    meet(launch, Clock::now() + timeout);
  } catch (const PeerLostError&) {
    sweep_dead_sockets(launch);
    throw;
  }
}

void ProcessControl::meet(const LaunchEnvironment& launch, Clock::time_point end) {
  host_ = wait_out_limit(end, [] { return host_identity(); });
  if (size() == 1) {
    make_loop(launch, end);
    loop_->start_as_hub(-1, "", "");
  } else if (launch.one_host()) {
    join_one_host(launch, end);
  } else {
    join_hosts(launch, end);
  }
  const WelcomeFrame welcome = state()->await_welcome();
  if (secret_.empty()) secret_ = welcome.secret;
  if (size() == 1) return;
  std::map<std::string_view, int> numbers;
  for (const std::string& host : welcome.hosts) {
    hosts_.push_back(numbers.emplace(host, static_cast<int>(numbers.size())).first->second);
  }
  connect_descriptors(launch, welcome.hosts, end);
  enter_tree(launch, ControlTree(welcome.hosts), end);
}

void ProcessControl::make_loop(const LaunchEnvironment& launch, Clock::time_point end) {
  set_state(std::make_shared<ControlState>());
  loop_ = wait_out_limit(end, [&] {
    try {
      return std::make_unique<ControlLoop>(state(), own_frame(launch), timeout());
    } catch (const boost::system::system_error& error) {
      errno = error.code().value();
      throw_if_descriptor_limit("rendezvous: cannot watch connections");
      throw;
    }
  });
}

JoinFrame ProcessControl::own_frame(const LaunchEnvironment& launch) const {
  JoinFrame frame;
  frame.rank = rank();
  frame.size = size();
  frame.restart_count = launch.common_restart_count();
  frame.job = launch.job;
  frame.host = host_;
  frame.address = address_;
  frame.process = process_;
  return frame;
}

void ProcessControl::join_one_host(const LaunchEnvironment& launch, Clock::time_point end) {
  const auto path = job_socket_path(launch, "rank0");
  make_loop(launch, end);
  if (rank() != 0) {
    UniqueFd socket =
        retry_until(end, [&] { return connect_job_socket(path, SOCK_STREAM, left_until(end)); });
    if (!socket) {
      static_cast<void>(sweep_job_socket(path));
      throw_hub_absent(path.string(), timeout(), rank(), size(),
                       launch.local_size ? ""
                                         : " (taken for one host; if it is not, set HSDP_ADDR, "
                                           "HSDP_PORT and HSDP_SECRET)");
    }
    loop_->start_as_rank(std::move(socket));
    static_cast<void>(state()->await_welcome());
    return;
  }
  auto door = retry_until(end, [&] { return JobSocket::claim(path, SOCK_STREAM); });
  if (!door) {
    throw Error("rendezvous: another process is rank 0 of this job (" + path.string() +
                "); end it or set another HSDP_JOB");
  }
  welcome_all(door->listener(), "", random_secret());
}

void ProcessControl::join_hosts(const LaunchEnvironment& launch, Clock::time_point end) {
  wait_out_limit(end, [&] { require_tcp_settings(launch); });
  if (rank() != 0) return knock_until_welcomed(launch, end);
  const UniqueFd door =
      wait_out_limit(end, [&] { return listen_tcp_hub(*launch.address, *launch.port); });
  const ForkGuard guard(door.get());
  address_ = own_address(door.get());
  make_loop(launch, end);
  welcome_all(door.get(), secret_, "");
}

// For rank 0: waits until all have joined.
void ProcessControl::welcome_all(int door, const std::string& secret,
                                 const std::string& welcome_secret) {
  loop_->start_as_hub(door, secret, welcome_secret);
  try {
    static_cast<void>(state()->await_welcome());
  } catch (...) {
    loop_->stop();  // tells latecomers while the door is still open
    throw;
  }
  loop_->stop_listening();
}

// Reconnects if the connection ends before the welcome, for as long as rank 0 listens.
void ProcessControl::knock_until_welcomed(const LaunchEnvironment& launch, Clock::time_point end) {
  constexpr Millis kPatienceWithAbsent{1'000};
  constexpr Millis kTimeToAnswer{200};
  const std::string where = *launch.address + ":" + std::to_string(*launch.port);
  std::exception_ptr lost;
  for (;;) {
    Clock::time_point listened = Clock::now();
    std::string problem;
    bool was_refused = false;
    Knock knock = retry_until(end, [&] {
      const Millis left = left_until(end);
      Knock one = connect_tcp_hub(*launch.address, *launch.port, secret_, left);
      // A last attempt may be too short for an answer, and a listener that answered once is there.
      const bool tells = left >= kTimeToAnswer || problem.empty();
      if (one.somebody_listens || (tells && !was_refused)) problem = one.problem;
      was_refused = was_refused || one.somebody_listens;
      if (one.somebody_listens) listened = Clock::now();
      if (lost && Clock::now() - listened > kPatienceWithAbsent) std::rethrow_exception(lost);
      return one;
    });
    if (!knock) {
      if (lost) std::rethrow_exception(lost);
      if (is_loopback(*launch.address)) {
        problem += ", and HSDP_ADDR is a loopback here, which leads to no other host";
      }
      throw_hub_absent(where, timeout(), rank(), size(), " (" + problem + ")");
    }
    address_ = own_address(knock.socket.get());
    make_loop(launch, end);
    loop_->start_as_rank(std::move(knock.socket));
    try {
      static_cast<void>(state()->await_welcome());
      return;
    } catch (const PeerLostError&) {
      if (!loop_->lost_hub()) throw;  // rank 0 said which rank was lost
      lost = std::current_exception();
      loop_->stop();
    }
  }
}

// Ranks with one host identity meet at the lowest of them, the broker. A rank that cannot reach it
// (another mount namespace) shares memory with no other rank.
void ProcessControl::connect_descriptors(const LaunchEnvironment& launch,
                                         const std::vector<std::string>& hosts,
                                         Clock::time_point end) {
  std::vector<int> everyone;
  std::vector<int> local_ranks;
  for (int rank = 0; rank < size(); ++rank) {
    everyone.push_back(rank);
    if (hosts[static_cast<std::size_t>(rank)] == host_) local_ranks.push_back(rank);
  }
  const int leader = local_ranks.front();
  const bool leads = leader == rank() && local_ranks.size() > 1;
  const WaitState waiting{"rendezvous"};
  const auto own_path = job_socket_path(launch, leader_name(rank()));
  std::optional<JobSocket> door =
      leads ? wait_out_limit(end, [&] { return try_to_claim(own_path, SOCK_SEQPACKET); })
            : std::nullopt;
  // Start accepting now: more ranks may come than the queue holds.
  if (door) loop_->lead_descriptors(door->take_listener(), local_ranks);
  const auto paths =
      exchange("hsdp leader paths", everyone, door ? own_path.string() : "", waiting);
  const std::string& leader_path = paths[static_cast<std::size_t>(leader)];
  bool reaches = door.has_value();
  if (!leads && !leader_path.empty()) {
    UniqueFd socket = wait_out_limit(
        end, [&] { return try_to_follow(leader_path, SOCK_SEQPACKET, left_until(end)); });
    reaches = static_cast<bool>(socket);
    if (reaches) loop_->follow_descriptors(std::move(socket), leader);
  }
  const auto reached = exchange("hsdp leader reach", everyone, reaches ? "yes" : "no", waiting);
  for (const int rank : local_ranks) {
    const bool both = reaches && reached[static_cast<std::size_t>(rank)] == "yes";
    if (both) shares_[static_cast<std::size_t>(rank)] = true;
  }
}

// Ranks that cannot reach their parent keep their own link to rank 0.
void ProcessControl::enter_tree(const LaunchEnvironment& launch, ControlTree tree,
                                Clock::time_point end) {
  if (tree.is_flat()) return;
  std::vector<int> everyone(static_cast<std::size_t>(size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  const WaitState waiting{"rendezvous"};
  const auto own_path = job_socket_path(launch, relay_name(rank()));
  std::vector<int> children = tree.children(rank());
  const bool leads = rank() != 0 && !children.empty();
  std::optional<JobSocket> door =
      leads ? wait_out_limit(end, [&] { return try_to_claim(own_path, SOCK_STREAM); })
            : std::nullopt;
  if (door) loop_->lead_children(door->take_listener(), std::move(children));
  const auto paths = exchange("hsdp relay paths", everyone, door ? own_path.string() : "", waiting);
  const int parent = tree.parent(rank());
  bool follows = false;
  if (parent > 0 && !paths[static_cast<std::size_t>(parent)].empty()) {
    UniqueFd socket = wait_out_limit(end, [&] {
      return try_to_follow(paths[static_cast<std::size_t>(parent)], SOCK_STREAM, left_until(end));
    });
    follows = socket && loop_->follow_parent(std::move(socket), parent, end);
  }
  const auto reached = exchange("hsdp relay reach", everyone, follows ? "yes" : "no", waiting);
  for (int other = 1; other < size(); ++other) {
    if (reached[static_cast<std::size_t>(other)] != "yes") tree.cut(other);
  }
  loop_->enter_tree(tree);
  forget_groups();
  // No rank continues before every rank is heard through the tree.
  static_cast<void>(exchange("hsdp tree", everyone, "", waiting));
}

std::shared_ptr<Control> connect_control(const LaunchEnvironment& launch,
                                         std::chrono::milliseconds timeout) {
  return std::make_shared<ProcessControl>(launch, timeout);
}

}  // namespace hsdp::comm
