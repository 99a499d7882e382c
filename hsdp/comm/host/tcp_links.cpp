#include "hsdp/comm/host/tcp_links.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstring>
#include <deque>
#include <sstream>

#include "hsdp/comm/host/host_wait.h"
#include "hsdp/comm/rendezvous/handshake.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::chrono::milliseconds kLook{50};  // between looks at the world's failure

// First on every connection: who calls, and that it knows the listener's token.
struct Hello {
  std::array<char, 8> magic{'h', 's', 'd', 'p', 't', 'c', 'p', '1'};
  std::array<char, 32> token{};
  std::uint32_t rank = 0;  // in the group
  std::uint32_t unused = 0;
};
static_assert(sizeof(Hello) == 48);

struct Address {
  std::string host;
  unsigned short port = 0;
  std::array<char, 32> token{};
};

void set_option(int socket, int level, int option, int value) {
  ::setsockopt(socket, level, option, &value, sizeof value);  // tuning: works without
}

void tune(int socket, std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kDeadLink{30'000};
  const auto dead = static_cast<int>(std::min(kDeadLink, timeout).count());
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, dead / 2000));
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, dead / 6000));
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, dead);
  ::fcntl(socket, F_SETFD, FD_CLOEXEC);
}

// Makes all connections of one rank of one group.
class Linker {
 public:
  explicit Linker(const TcpLinks& links);
  std::vector<UniqueFd> run();

 private:
  struct Caller {  // accepted, its hello not complete
    tcp::socket socket;
    Hello hello;
    std::size_t received = 0;
  };

  void listen();
  std::vector<Address> exchange_addresses();
  void connect_to(int rank, const Address& address);
  void accept_rest();
  void accept_new();
  // False when the caller is to be dropped.
  bool hear(Caller& caller);
  bool admit(Caller& caller);
  void keep(int rank, tcp::socket socket);
  [[nodiscard]] bool needs(int rank) const;
  [[nodiscard]] std::string context(int caller, int listener) const;
  [[noreturn]] void give_up(int rank, const std::string& reason);

  const TcpLinks& links_;
  Control& control_;
  int rank_;
  asio::io_context context_;
  tcp::acceptor listener_{context_};
  std::array<char, 32> token_{};
  std::deque<Caller> callers_;
  std::vector<UniqueFd> sockets_;
};

Linker::Linker(const TcpLinks& links)
    : links_(links),
      control_(links.control),
      rank_(static_cast<int>(std::ranges::find(links.members, links.control.rank()) -
                             links.members.begin())),
      sockets_(links.members.size()) {
  const std::string secret = random_secret();
  std::memcpy(token_.data(), secret.data(), std::min(secret.size(), token_.size()));
}

bool Linker::needs(int rank) const {
  const auto index = static_cast<std::size_t>(rank);
  return !std::ranges::binary_search(links_.neighbours, links_.members[index]) && !sockets_[index];
}

std::string Linker::context(int caller, int listener) const {
  std::string text = "data " + std::to_string(caller) + ">" + std::to_string(listener) + " ";
  text += links_.group_id.substr(0, 64 - text.size());
  return text;
}

void Linker::give_up(int rank, const std::string& reason) {
  const int world_rank = links_.members[static_cast<std::size_t>(rank)];
  end_world(control_,
            {.kind = FailureKind::kPeerLost,
             .message = "tcp: cannot connect to rank " + std::to_string(world_rank) + " of " +
                        std::to_string(control_.size()) + ": " + reason,
             .ranks = {world_rank}},
            {.operation = "connect"});
}

void Linker::listen() {
  error_code error;
  const auto address = asio::ip::make_address(control_.address(), error);
  const auto any = address.is_v6() ? tcp::v6() : tcp::v4();
  listener_.open(any);
  ::fcntl(listener_.native_handle(), F_SETFD, FD_CLOEXEC);
  if (!error) listener_.bind({address, 0}, error);
  if (error) listener_.bind({any, 0});
  listener_.listen(tcp::acceptor::max_listen_connections);
  listener_.non_blocking(true);
}

std::vector<Address> Linker::exchange_addresses() {
  std::ostringstream mine;
  mine << control_.address() << ' ' << listener_.local_endpoint().port() << ' '
       << std::string_view(token_.data(), token_.size());
  std::vector<int> ascending = links_.members;
  std::ranges::sort(ascending);
  const auto messages =
      control_.exchange(links_.group_id + "/tcp", ascending, mine.str(), {.operation = "connect"});
  std::vector<Address> addresses(links_.members.size());
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const auto rank = std::ranges::find(links_.members, ascending[i]) - links_.members.begin();
    Address& address = addresses[static_cast<std::size_t>(rank)];
    std::string token;
    std::istringstream(messages[i]) >> address.host >> address.port >> token;
    std::memcpy(address.token.data(), token.data(), std::min(token.size(), address.token.size()));
  }
  return addresses;
}

void Linker::keep(int rank, tcp::socket socket) {
  tune(socket.native_handle(), control_.timeout());
  socket.native_non_blocking(true);
  sockets_[static_cast<std::size_t>(rank)].reset(socket.release());
}

void Linker::connect_to(int rank, const Address& address) {
  error_code error;
  const auto host = asio::ip::make_address(address.host, error);
  if (error) give_up(rank, "its address '" + address.host + "' is no number");
  tcp::socket socket(context_);
  const tcp::endpoint endpoint(host, address.port);
  socket.open(endpoint.protocol());
  tune(socket.native_handle(), control_.timeout());
  socket.native_non_blocking(true);
  AnnouncedWait announced(control_, {.operation = "connect"});
  announced.waits_for(links_.members[static_cast<std::size_t>(rank)]);
  if (::connect(socket.native_handle(), endpoint.data(), static_cast<socklen_t>(endpoint.size())) !=
          0 &&
      errno != EINPROGRESS) {
    give_up(rank, std::strerror(errno));
  }
  pollfd ready{socket.native_handle(), POLLOUT, 0};
  while (::poll(&ready, 1, static_cast<int>(kLook.count())) <= 0) control_.throw_if_failed();
  int outcome = 0;
  socklen_t size = sizeof outcome;
  ::getsockopt(socket.native_handle(), SOL_SOCKET, SO_ERROR, &outcome, &size);
  if (outcome != 0) give_up(rank, std::strerror(outcome));
  Hello hello;
  hello.token = address.token;
  hello.rank = static_cast<std::uint32_t>(rank_);
  // Fits the empty send buffer of a fresh connection.
  if (socket.send(asio::buffer(&hello, sizeof hello), 0, error) != sizeof hello) {
    give_up(rank, error.message());
  }
  if (!control_.secret().empty() &&
      !prove_secret(socket.native_handle(), HandshakeRole::kConnecting, control_.secret(),
                    context(rank_, rank), control_.timeout())) {
    give_up(rank, "it did not prove the job's secret");
  }
  keep(rank, std::move(socket));
}

bool Linker::admit(Caller& caller) {
  const auto rank = static_cast<int>(caller.hello.rank);
  const bool known = caller.hello.magic == Hello().magic && caller.hello.token == token_ &&
                     rank > rank_ && rank < static_cast<int>(links_.members.size()) && needs(rank);
  if (!known) return false;
  if (!control_.secret().empty() &&
      !prove_secret(caller.socket.native_handle(), HandshakeRole::kAccepting, control_.secret(),
                    context(rank, rank_), control_.timeout())) {
    return false;
  }
  keep(rank, std::move(caller.socket));
  return false;
}

bool Linker::hear(Caller& caller) {
  error_code error;
  auto* const bytes = reinterpret_cast<std::byte*>(&caller.hello);
  caller.received += caller.socket.receive(
      asio::buffer(bytes + caller.received, sizeof(Hello) - caller.received), 0, error);
  if (error == asio::error::would_block || error == asio::error::interrupted) return true;
  if (error) return false;
  return caller.received < sizeof(Hello) || admit(caller);
}

void Linker::accept_new() {
  constexpr std::size_t kMostCallers = 64;
  for (;;) {
    error_code error;
    tcp::socket socket = listener_.accept(error);
    if (error) return;
    ::fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
    socket.non_blocking(true);
    if (callers_.size() == kMostCallers) callers_.pop_front();  // the slowest stranger
    callers_.push_back({.socket = std::move(socket), .hello = {}, .received = 0});
    callers_.back().hello.magic = {};
  }
}

void Linker::accept_rest() {
  AnnouncedWait announced(control_, {.operation = "connect"});
  const int size = static_cast<int>(links_.members.size());
  for (int rank = rank_ + 1; rank < size;) {
    if (!needs(rank)) {
      ++rank;
      continue;
    }
    announced.waits_for(links_.members[static_cast<std::size_t>(rank)]);
    std::vector<pollfd> ready{{listener_.native_handle(), POLLIN, 0}};
    for (Caller& caller : callers_) ready.push_back({caller.socket.native_handle(), POLLIN, 0});
    ::poll(ready.data(), ready.size(), static_cast<int>(kLook.count()));
    control_.throw_if_failed();
    accept_new();
    std::erase_if(callers_, [&](Caller& caller) { return !hear(caller); });
  }
}

std::vector<UniqueFd> Linker::run() {
  listen();
  const auto addresses = exchange_addresses();
  for (int rank = 0; rank < rank_; ++rank) {
    if (needs(rank)) connect_to(rank, addresses[static_cast<std::size_t>(rank)]);
  }
  accept_rest();
  return std::move(sockets_);
}

}  // namespace

std::vector<UniqueFd> connect_tcp(const TcpLinks& links) { return Linker(links).run(); }

}  // namespace hsdp::comm
