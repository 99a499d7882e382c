#include "hsdp/comm/mpi/address_probe.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

struct Found {
  int order = 0;  // lower is better
  std::string address;
};

// Empty for addresses that no other host can use.
Found describe(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr || (entry.ifa_flags & IFF_UP) == 0U) return {};
  const bool is_loopback = (entry.ifa_flags & IFF_LOOPBACK) != 0U;
  const int family = entry.ifa_addr->sa_family;
  socklen_t length = sizeof(sockaddr_in);
  if (family == AF_INET6) {
    const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(entry.ifa_addr);  // NOLINT
    if (IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr) || is_loopback) return {};
    length = sizeof(sockaddr_in6);
  } else if (family != AF_INET) {
    return {};
  }
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(entry.ifa_addr, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) !=
      0) {
    return {};
  }
  const int order = is_loopback ? 2 : family == AF_INET6 ? 1 : 0;
  return {order, text.data()};
}

UniqueFd listen_everywhere(int family) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return {};
  const int no = 0;
  if (family == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  sockaddr_storage any{};  // all zeros: every address, any port
  any.ss_family = static_cast<sa_family_t>(family);
  const auto length =
      static_cast<socklen_t>(family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
  const auto* const generic = reinterpret_cast<const sockaddr*>(&any);  // NOLINT
  if (::bind(fd.get(), generic, length) != 0 || ::listen(fd.get(), SOMAXCONN) != 0) return {};
  return fd;
}

}  // namespace

std::vector<std::string> own_addresses(std::size_t most) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) list = nullptr;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::vector<Found> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    Found one = describe(*entry);
    if (!one.address.empty()) found.push_back(std::move(one));
  }
  std::ranges::stable_sort(found, {}, &Found::order);
  std::vector<std::string> addresses;
  for (const Found& one : found) {
    if (addresses.size() < most) addresses.push_back(one.address);
  }
  return addresses;
}

void AddressProbe::open() {
  socket_ = listen_everywhere(AF_INET6);
  if (!socket_) socket_ = listen_everywhere(AF_INET);
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  auto* const generic = reinterpret_cast<sockaddr*>(&bound);  // NOLINT: the sockets interface
  if (!socket_ || ::getsockname(socket_.get(), generic, &length) != 0) {
    throw Error(std::string("rendezvous: rank 0 cannot listen: ") + std::strerror(errno));
  }
  // Both kinds of address have the port at the same place.
  port_ = ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);  // NOLINT
}

bool reaches(const std::string& address, int port) {
  constexpr int kPatienceMs = 2'000;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | AI_NUMERICHOST;
  addrinfo* list = nullptr;
  if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &list) != 0) {
    return false;
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  const UniqueFd fd(::socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return false;
  if (::connect(fd.get(), list->ai_addr, list->ai_addrlen) == 0) return true;
  if (errno != EINPROGRESS) return false;
  pollfd ready{fd.get(), POLLOUT, 0};
  if (::poll(&ready, 1, kPatienceMs) <= 0) return false;
  int error = 0;
  socklen_t length = sizeof error;
  return ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
}

}  // namespace hsdp::comm
