// What tests of the TCP rendezvous share: a free port, the settings of ranks that are each on a
// different host, and strangers that connect.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <thread>

#include "hsdp/comm/unique_fd.h"
#include "tests/comm/control_outcome.h"

namespace hsdp::comm {

inline sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

// Occupies a port while it lives; 0: any port.
class TakenPort {
 public:
  explicit TakenPort(int port = 0) {
    sockaddr_in address = loopback(port);
    socklen_t length = sizeof address;
    EXPECT_EQ(::bind(fd(), reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(::getsockname(fd(), reinterpret_cast<sockaddr*>(&address), &length), 0);
    number_ = ntohs(address.sin_port);
  }
  void listen(int backlog) const { EXPECT_EQ(::listen(fd(), backlog), 0); }
  [[nodiscard]] int fd() const { return socket_.get(); }
  [[nodiscard]] int number() const { return number_; }

 private:
  UniqueFd socket_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  int number_ = 0;
};

inline int free_port() { return TakenPort().number(); }

// Retries until rank 0 listens.
inline UniqueFd connect_to(int port) {
  const sockaddr_in address = loopback(port);
  for (int attempt = 0; attempt < 2000; ++attempt) {
    UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
      return socket;
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
  ADD_FAILURE() << "nobody listens at port " << port;
  return {};
}

inline constexpr const char* kJobSecret = "the secret of this job";

// The launcher says that every rank is alone on its host.
inline ProcessOptions ranks_on_hosts(int port) {
  return {.environment = {{"LOCAL_RANK", "0"},
                          {"LOCAL_WORLD_SIZE", "1"},
                          {"HSDP_ADDR", "127.0.0.1"},
                          {"HSDP_PORT", std::to_string(port)},
                          {"HSDP_SECRET", kJobSecret}}};
}

}  // namespace hsdp::comm
