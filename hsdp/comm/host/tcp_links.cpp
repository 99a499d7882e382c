#include "hsdp/comm/host/tcp_links.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <list>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "hsdp/comm/agreed_error.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/descriptor_limit.h"
#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/host/host_wait.h"
#include "hsdp/comm/host/shared_segment.h"
#include "hsdp/comm/host/tcp_handshake.h"
#include "hsdp/comm/rendezvous/handshake.h"

namespace hsdp::comm {
namespace {

namespace ip = boost::asio::ip;
using Clock = std::chrono::steady_clock;
using Millis = std::chrono::milliseconds;

std::string problem_text(int error) { return std::generic_category().message(error); }

std::string descriptor_problem(std::size_t links) {
  return "tcp: cannot open links to " + std::to_string(links) +
         " peers: " + descriptor_limit_text() + ", or use engine 'mpi'";
}

// Sets neither keepalive nor TCP_USER_TIMEOUT: Control detects dead peers [Note: dead links].
void tune(int socket) {
  const int yes = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

// A descriptor that a forked child closes.
struct GuardedFd {
  UniqueFd fd;
  ForkGuard guard{fd.get()};
};

// Makes all connections of one rank of one group.
class Linker {
 public:
  explicit Linker(const TcpLinks& links);
  std::vector<UniqueFd> run();

 private:
  // A member before this one: called until it answers.
  struct Callee {
    int rank = 0;
    ip::tcp::endpoint address;
    std::string token;
    std::optional<TcpHandshake> handshake;  // empty between two calls
    Clock::time_point called;
    Clock::time_point next_call;
    Millis pause{10};
    std::optional<Clock::time_point> first_refusal;
  };

  // What this rank sends to the others: its address, or '!' and the reason why it has none.
  [[nodiscard]] std::string prepare();
  [[nodiscard]] bool listen();
  void learn_addresses(const std::vector<std::string>& messages, const std::vector<int>& ascending);
  void connect();
  void call_those_due();
  void wait_and_advance();
  void advance(Callee& callee);
  void call_later(Callee& callee, const std::string& reason);
  void judge_silence(const Callee& callee);
  [[noreturn]] void give_up_on(const Callee& callee, FailureKind kind, const std::string& reason);
  void accept_new();
  void advance_caller(std::list<TcpHandshake>::iterator caller);
  void keep(int rank, UniqueFd socket);
  // A new descriptor from `open`; if necessary, frees a reserved one or drops a stranger.
  template <typename Open>
  [[nodiscard]] UniqueFd open_socket(Open open);

  [[nodiscard]] bool is_neighbour(int rank) const;
  [[nodiscard]] bool needs(int rank) const;
  [[nodiscard]] std::size_t count_expected_callers() const;
  [[nodiscard]] SecretProof proof(HandshakeRole role, int caller, int listener,
                                  const std::string& token) const;
  [[noreturn]] void give_up(const Failure& failure);

  const TcpLinks& links_;
  Control& control_;
  int size_;
  int rank_;
  std::string token_ = random_secret();
  UniqueFd listener_;
  ForkGuard listener_guard_;
  std::vector<GuardedFd> reserved_;  // ensures enough descriptors before any rank begins
  std::list<Callee> callees_;
  std::list<TcpHandshake> callers_;  // not proven yet, oldest first
  std::vector<UniqueFd> sockets_;
};

Linker::Linker(const TcpLinks& links)
    : links_(links),
      control_(links.control),
      size_(static_cast<int>(links.members.size())),
      rank_(static_cast<int>(std::ranges::find(links.members, links.control.rank()) -
                             links.members.begin())),
      sockets_(links.members.size()) {}

bool Linker::is_neighbour(int rank) const {
  return std::ranges::binary_search(links_.neighbours,
                                    links_.members[static_cast<std::size_t>(rank)]);
}

bool Linker::needs(int rank) const {
  return !is_neighbour(rank) && !sockets_[static_cast<std::size_t>(rank)];
}

std::size_t Linker::count_expected_callers() const {
  std::size_t count = 0;
  for (int rank = rank_ + 1; rank < size_; ++rank) count += needs(rank) ? 1 : 0;
  return count;
}

SecretProof Linker::proof(HandshakeRole role, int caller, int listener,
                          const std::string& token) const {
  const std::string who = "data " + std::to_string(caller) + ">" + std::to_string(listener) + " ";
  return {role, control_.secret() + token, who + std::string(links_.key)};
}

void Linker::give_up(const Failure& failure) {
  end_world(control_, failure, {.operation = "connect"});
}

bool Linker::listen() {
  boost::system::error_code no_number;
  const auto address = ip::make_address(control_.address(), no_number);
  const auto any = address.is_v6() ? ip::tcp::v6() : ip::tcp::v4();
  listener_.reset(::socket(any.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener_) return false;
  listener_guard_ = ForkGuard(listener_.get());
  const ip::tcp::endpoint own(address, 0);
  const ip::tcp::endpoint everywhere(any, 0);
  const int socket = listener_.get();
  const bool bound =
      !no_number && ::bind(socket, own.data(), static_cast<socklen_t>(own.size())) == 0;
  return (bound ||
          ::bind(socket, everywhere.data(), static_cast<socklen_t>(everywhere.size())) == 0) &&
         ::listen(socket, SOMAXCONN) == 0;
}

std::string Linker::prepare() {
  const std::size_t wanted = links_.members.size() - links_.neighbours.size();
  if (!listen()) {
    if (is_descriptor_limit(errno)) return "!" + descriptor_problem(wanted);
    return "!tcp: cannot listen at " + control_.address() + ": " + problem_text(errno);
  }
  // One more than links, since the epoll set needs a descriptor, too.
  while (reserved_.size() <= wanted) {
    UniqueFd place(::fcntl(listener_.get(), F_DUPFD_CLOEXEC, 0));
    if (!place) return "!" + descriptor_problem(wanted);
    reserved_.push_back({std::move(place)});
  }
  ip::tcp::endpoint bound;
  auto length = static_cast<socklen_t>(bound.capacity());
  ::getsockname(listener_.get(), bound.data(), &length);
  return control_.address() + ' ' + std::to_string(bound.port()) + ' ' + token_;
}

void Linker::learn_addresses(const std::vector<std::string>& messages,
                             const std::vector<int>& ascending) {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    if (!messages[i].starts_with('!')) continue;
    throw AgreedError(messages[i].substr(1), ascending[i], control_.size());
  }
  for (int rank = 0; rank < rank_; ++rank) {
    if (is_neighbour(rank)) continue;
    const int member = links_.members[static_cast<std::size_t>(rank)];
    const auto place = std::ranges::lower_bound(ascending, member) - ascending.begin();
    std::string host;
    unsigned short port = 0;
    Callee callee{.rank = rank};
    std::istringstream(messages[static_cast<std::size_t>(place)]) >> host >> port >> callee.token;
    boost::system::error_code error;
    callee.address = {ip::make_address(host, error), port};
    if (error) {
      give_up({.kind = FailureKind::kPeerLost,
               .message = "tcp: cannot connect to rank " + std::to_string(member) + " of " +
                          std::to_string(control_.size()) + ": its address '" + host +
                          "' is not numeric",
               .ranks = {member}});
    }
    callees_.push_back(std::move(callee));
  }
}

template <typename Open>
UniqueFd Linker::open_socket(Open open) {
  for (;;) {
    UniqueFd socket(open());
    if (socket || !is_descriptor_limit(errno)) return socket;
    if (!reserved_.empty()) {
      reserved_.pop_back();
    } else if (!callers_.empty()) {
      callers_.pop_front();
    } else {
      give_up({.kind = FailureKind::kAborted,
               .message = descriptor_problem(links_.members.size() - links_.neighbours.size()) +
                          " (rank " + std::to_string(control_.rank()) + " of " +
                          std::to_string(control_.size()) + ")",
               .ranks = {control_.rank()}});
    }
  }
}

void Linker::keep(int rank, UniqueFd socket) {
  sockets_[static_cast<std::size_t>(rank)] = std::move(socket);
  if (!reserved_.empty()) reserved_.pop_back();
}

void Linker::call_those_due() {
  for (Callee& callee : callees_) {
    if (callee.handshake || Clock::now() < callee.next_call) continue;
    UniqueFd socket = open_socket([&] {
      return ::socket(callee.address.protocol().family(),
                      SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    });
    if (!socket || (::connect(socket.get(), callee.address.data(),
                              static_cast<socklen_t>(callee.address.size())) != 0 &&
                    errno != EINPROGRESS)) {
      call_later(callee, problem_text(errno));
      continue;
    }
    tune(socket.get());
    callee.called = Clock::now();
    callee.handshake.emplace(std::move(socket), rank_,
                             proof(HandshakeRole::kConnecting, rank_, callee.rank, callee.token));
  }
}

// A refusal may be temporary: the callee may have dropped this rank as a stranger. If the callee
// has ended, Control reports it before the patience is over.
void Linker::call_later(Callee& callee, const std::string& reason) {
  constexpr Millis kPatience{10'000};
  constexpr Millis kLongestPause{320};
  const auto now = Clock::now();
  if (!callee.first_refusal) callee.first_refusal = now;
  if (now - *callee.first_refusal >= std::min(kPatience, control_.timeout() / 2)) {
    give_up_on(callee, FailureKind::kPeerLost, reason);
  }
  callee.handshake.reset();
  callee.next_call = now + callee.pause;
  callee.pause = std::min(2 * callee.pause, kLongestPause);
}

// The kernel accepts for a process, even a stopped one, until the listener's queue is full. This
// limit comes before the world's timeout, which does not know the address.
void Linker::judge_silence(const Callee& callee) {
  constexpr Millis kPatience{30'000};  // as for a dead control link
  const auto patience = std::min(kPatience, control_.timeout() / 2);
  if (!callee.handshake || callee.handshake->is_connected()) return;
  const auto silent = std::chrono::duration_cast<Millis>(Clock::now() - callee.called);
  if (silent < patience) return;
  give_up_on(
      callee, FailureKind::kTimeout,
      "no answer within " + seconds_text(silent) +
          ", as where a firewall drops packets, or where a stopped rank has too many callers");
}

void Linker::give_up_on(const Callee& callee, FailureKind kind, const std::string& reason) {
  const int member = links_.members[static_cast<std::size_t>(callee.rank)];
  std::ostringstream message;
  message << "tcp: cannot connect to rank " << member << " of " << control_.size() << " at "
          << callee.address << ": " << reason
          << "; let the hosts connect to each other at any port, or use engine 'mpi'";
  give_up({.kind = kind, .message = message.str(), .ranks = {member}});
}

void Linker::advance(Callee& callee) {
  switch (callee.handshake->advance()) {
    case TcpHandshake::State::kWaiting:
      return;
    case TcpHandshake::State::kProven:
      return keep(callee.rank, callee.handshake->take_socket());
    case TcpHandshake::State::kBroken:
      return call_later(callee, callee.handshake->problem());
  }
}

void Linker::advance_caller(std::list<TcpHandshake>::iterator caller) {
  const auto state = caller->advance();
  if (state == TcpHandshake::State::kWaiting) return;
  if (state == TcpHandshake::State::kProven && needs(caller->caller())) {
    keep(caller->caller(), caller->take_socket());
  }
  callers_.erase(caller);
}

// There may be any number of strangers: the oldest callers make room, and a member among them calls
// again.
void Linker::accept_new() {
  constexpr std::size_t kMostStrangers = 64;
  for (;;) {
    UniqueFd socket = open_socket(
        [&] { return ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (!socket) return;
    tune(socket.get());
    if (callers_.size() >= count_expected_callers() + kMostStrangers) callers_.pop_front();
    callers_.emplace_back(std::move(socket), [this](int caller) -> std::optional<SecretProof> {
      if (caller <= rank_ || caller >= size_ || !needs(caller)) return std::nullopt;
      return proof(HandshakeRole::kAccepting, caller, rank_, token_);
    });
    advance_caller(std::prev(callers_.end()));
  }
}

void Linker::wait_and_advance() {
  constexpr Millis kLook{50};  // between checks for the world's failure and for due calls
  constexpr Millis kLookToCall{5};
  std::vector<pollfd> fds{{listener_.get(), POLLIN, 0}};
  bool calls_later = false;
  for (const Callee& callee : callees_) {
    calls_later = calls_later || !callee.handshake;
    fds.push_back(callee.handshake ? callee.handshake->awaited() : pollfd{-1, 0, 0});
  }
  for (const TcpHandshake& caller : callers_) fds.push_back(caller.awaited());
  ::poll(fds.data(), fds.size(), static_cast<int>((calls_later ? kLookToCall : kLook).count()));
  auto fd = fds.begin() + 1;
  for (Callee& callee : callees_) {
    if ((fd++)->revents != 0) advance(callee);
  }
  for (auto caller = callers_.begin(); caller != callers_.end();) {
    const auto next = std::next(caller);
    if ((fd++)->revents != 0) advance_caller(caller);
    caller = next;
  }
  if (fds.front().revents != 0) accept_new();
  std::erase_if(callees_, [&](const Callee& callee) { return !needs(callee.rank); });
}

void Linker::connect() {
  AnnouncedWait announced(control_, {.operation = "connect"});
  for (int missing = 0; missing < size_;) {
    if (!needs(missing)) {
      ++missing;
      continue;
    }
    announced.waits_for(links_.members[static_cast<std::size_t>(missing)]);
    call_those_due();
    wait_and_advance();
    for (const Callee& callee : callees_) judge_silence(callee);
    control_.throw_if_failed();
  }
}

std::vector<UniqueFd> Linker::run() {
  std::vector<int> ascending = links_.members;
  std::ranges::sort(ascending);
  const std::string own = prepare();
  learn_addresses(control_.exchange(links_.key, ascending, own, {.operation = "connect"}),
                  ascending);
  connect();
  return std::move(sockets_);
}

}  // namespace

std::vector<UniqueFd> connect_tcp(const TcpLinks& links) { return Linker(links).run(); }

}  // namespace hsdp::comm
