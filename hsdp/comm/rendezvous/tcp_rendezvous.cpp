#include "hsdp/comm/rendezvous/tcp_rendezvous.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
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

// Empty where the name does not resolve (yet). The library may hide that no descriptor was free.
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

bool finish_connect(int socket, Millis limit) {
  pollfd ready{socket, POLLOUT, 0};
  if (::poll(&ready, 1, static_cast<int>(limit.count())) <= 0) return false;
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
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
  std::string problem;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    UniqueFd socket = open_socket(*one);
    const int yes = 1;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (::bind(socket.get(), one->ai_addr, one->ai_addrlen) == 0 &&
        ::listen(socket.get(), SOMAXCONN) == 0) {
      return socket;
    }
    problem = std::strerror(errno);
  }
  throw Error("rendezvous: rank 0 cannot listen at " + where +
              " (HSDP_ADDR:HSDP_PORT): " + problem);
}

Knock connect_tcp_hub(const std::string& address, int port, const std::string& secret,
                      Millis limit) {
  constexpr Millis kLongestAttempt{5'000};
  limit = std::clamp(limit, Millis(1), kLongestAttempt);
  const Addresses addresses = resolve(address, port);
  Knock knock;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    UniqueFd socket = open_socket(*one);
    if (!socket) continue;
    if (::connect(socket.get(), one->ai_addr, one->ai_addrlen) != 0 &&
        (errno != EINPROGRESS || !finish_connect(socket.get(), limit))) {
      continue;
    }
    knock.somebody_listens = true;
    if (prove_secret(socket.get(), HandshakeRole::kConnecting, secret, kControlContext, limit)) {
      knock.socket = std::move(socket);
      break;
    }
  }
  return knock;
}

std::string own_address(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);  // NOLINT: the sockets interface
  char host[NI_MAXHOST] = {};
  if (::getsockname(socket, generic, &length) != 0 ||
      ::getnameinfo(generic, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) {
    throw Error(
        "rendezvous: cannot tell this host's address; set HSDP_ADDR and HSDP_PORT on every rank");
  }
  return host;
}

}  // namespace hsdp::comm
