// Finds an address of one host that other hosts can reach: that host listens everywhere for a
// moment, and the others try its addresses.
//
// It does not prove who answers; the control connection, which follows, does.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

// Numeric addresses of this host's interfaces that are up: IPv4, IPv6, then loopback. At most
// `most` of them.
[[nodiscard]] std::vector<std::string> own_addresses(std::size_t most);

class AddressProbe {
 public:
  // Listens at a free port of every address until it is destroyed. Throws Error on failure.
  void open();
  [[nodiscard]] int port() const { return port_; }

 private:
  UniqueFd socket_;
  int port_ = 0;
};

// Whether something listens at the numeric address; gives up after two seconds.
[[nodiscard]] bool reaches(const std::string& address, int port);

}  // namespace hsdp::comm
