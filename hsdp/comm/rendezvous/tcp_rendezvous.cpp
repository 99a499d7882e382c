#include "hsdp/comm/rendezvous/tcp_rendezvous.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "hsdp/comm/descriptor_limit.h"
#include "hsdp/comm/rendezvous/handshake.h"
#include "hsdp/comm/rendezvous/join_listener.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

using Millis = std::chrono::milliseconds;
using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// Empty if the name does not resolve (yet). getaddrinfo() may hide that no descriptor was free.
Addresses resolve(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!probe) throw_if_descriptor_limit("rendezvous: cannot resolve '" + address + "'");
    found = nullptr;
  }
  return {found, &::freeaddrinfo};
}

UniqueFd open_socket(const addrinfo& address) {
  UniqueFd fd(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw_if_descriptor_limit("rendezvous: cannot open a socket");
  return fd;
}

// Returns the reason for a failure; "" once connected.
std::string connect_socket(int socket, const addrinfo& address, Millis limit) {
  if (::connect(socket, address.ai_addr, address.ai_addrlen) == 0) return {};
  if (errno != EINPROGRESS) return std::strerror(errno);
  pollfd ready{socket, POLLOUT, 0};
  if (::poll(&ready, 1, static_cast<int>(limit.count())) <= 0) return "no answer to packets";
  int error = 0;
  socklen_t length = sizeof error;
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length);
  return error == 0 ? "" : std::strerror(error);
}

// Empty if the system does not tell.
using SocketName = int (*)(int, sockaddr*, socklen_t*);
std::string numeric_address(int socket, SocketName name) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);  // NOLINT: the sockets interface
  char host[NI_MAXHOST] = {};
  if (name(socket, generic, &length) != 0 ||
      ::getnameinfo(generic, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  return host;
}

bool is_loopback(const sockaddr& address) {
  constexpr std::uint32_t kLoopbackNet = 127;
  if (address.sa_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);  // NOLINT
    return ntohl(in.sin_addr.s_addr) >> 24U == kLoopbackNet;
  }
  if (address.sa_family != AF_INET6) return false;
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);  // NOLINT
}

std::string remedy_for_door(int error) {
  if (error == EADDRINUSE) {
    return "; another job or step, or a program, has that port: set HSDP_PORT to a free one of "
           "rank 0's host on every rank";
  }
  if (error == EADDRNOTAVAIL) {
    return "; HSDP_ADDR is not an address of this host, where rank 0 runs: set it to one that the "
           "other hosts reach on every rank";
  }
  return "; set HSDP_ADDR and HSDP_PORT to another address and port of rank 0's host on every rank";
}

}  // namespace

void require_tcp_settings(const LaunchEnvironment& launch) {
  if (!launch.address || !launch.port) {
    throw UsageError(
        "rendezvous: the ranks are on several hosts: set HSDP_ADDR and HSDP_PORT on every rank to "
        "an address of rank 0's host and a free port of it (not MASTER_PORT)");
  }
  if (launch.master_port && launch.port == launch.master_port &&
      launch.address == launch.master_address) {
    throw UsageError(
        "rendezvous: HSDP_ADDR:HSDP_PORT is MASTER_ADDR:MASTER_PORT, which belongs to the "
        "launcher; set HSDP_PORT to another port");
  }
  if (launch.surely_several_hosts() && is_loopback(*launch.address)) {
    throw UsageError(
        {.where = "rendezvous: HSDP_ADDR",
         .expected = "an address of rank 0's host that the other hosts reach",
         .got = "'" + *launch.address + "', which means a loopback",
         .remedy = "set it to another one on every rank, as the first of hostname -I"});
  }
  if (!launch.secret) {
    throw UsageError(
        "rendezvous: the ranks are on several hosts: set HSDP_SECRET, or HSDP_SECRET_FILE to a "
        "file with it, to the same random text on every rank (from Python under torchrun also "
        "HSDP_TRUST_STORE=1: torch's store, which authenticates nobody, may carry one)");
  }
}

UniqueFd listen_tcp_hub(const std::string& address, int port) {
  const std::string where = address + ":" + std::to_string(port);
  const Addresses addresses = resolve(address, port);
  if (!addresses) throw UsageError("rendezvous: HSDP_ADDR: cannot resolve '" + address + "'");
  int problem = 0;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    UniqueFd socket = open_socket(*one);
    const int yes = 1;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (::bind(socket.get(), one->ai_addr, one->ai_addrlen) == 0 &&
        ::listen(socket.get(), SOMAXCONN) == 0) {
      return socket;
    }
    problem = errno;
  }
  throw Error("rendezvous: rank 0 cannot listen at " + where +
              " (HSDP_ADDR:HSDP_PORT): " + std::strerror(problem) + remedy_for_door(problem));
}

Knock connect_tcp_hub(const std::string& address, int port, const std::string& secret,
                      Millis limit) {
  constexpr Millis kLongestAttempt{5'000};
  limit = std::clamp(limit, Millis(1), kLongestAttempt);
  const Addresses addresses = resolve(address, port);
  Knock knock;
  if (!addresses) knock.problem = "cannot resolve '" + address + "'";
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    UniqueFd socket = open_socket(*one);
    const std::string problem =
        socket ? connect_socket(socket.get(), *one, limit) : std::strerror(errno);
    if (!problem.empty()) {
      // A listener at another address of the name has a better reason.
      if (!knock.somebody_listens) knock.problem = problem;
      continue;
    }
    knock.somebody_listens = true;
    if (prove_secret(socket.get(), HandshakeRole::kConnecting, secret, kControlContext, limit)) {
      knock.socket = std::move(socket);
      knock.problem.clear();
      break;
    }
    knock.problem =
        "it answers, but does not prove this job's secret: compare HSDP_SECRET, and see whether "
        "another job, step or program has the port";
  }
  return knock;
}

std::string own_address(int socket) {
  std::string address = numeric_address(socket, ::getsockname);
  if (!address.empty()) return address;
  throw Error(
      "rendezvous: cannot tell this host's address; set HSDP_ADDR and HSDP_PORT on every rank");
}

std::string peer_address(int socket) { return numeric_address(socket, ::getpeername); }

bool is_loopback(const std::string& address) {
  const Addresses addresses = resolve(address, 1);
  const addrinfo* one = addresses.get();
  while (one != nullptr && is_loopback(*one->ai_addr)) one = one->ai_next;
  return addresses && one == nullptr;
}

}  // namespace hsdp::comm
