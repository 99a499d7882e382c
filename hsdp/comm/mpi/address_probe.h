// Finds an address of one host that other hosts reach: the one listens everywhere for a moment, the
// others try the addresses that it has.
//
// It proves nothing about who answers: the control connection, which follows, does.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

// Numeric addresses of this host's interfaces that are up: IPv4, IPv6, then loopback. At most
// `most`.
[[nodiscard]] std::vector<std::string> own_addresses(std::size_t most);

class AddressProbe {
 public:
  // Listens at a free port of every address until it dies. Error when it cannot.
  void open();
  [[nodiscard]] int port() const { return port_; }

 private:
  UniqueFd socket_;
  int port_ = 0;
};

// True when something listens at the numeric address within two seconds.
[[nodiscard]] bool reaches(const std::string& address, int port);

}  // namespace hsdp::comm
