// Rank 0's TCP door at HSDP_ADDR:HSDP_PORT, for jobs of several hosts.
#pragma once

#include <chrono>
#include <string>

#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

// UsageError that names the variables to set, where address or secret are missing.
void require_tcp_settings(const LaunchEnvironment& launch);

// Listening and non-blocking. Error when the address is not of this host or the port is taken.
[[nodiscard]] UniqueFd listen_tcp_hub(const std::string& address, int port);

// What an attempt to reach rank 0 came to.
struct Knock {
  UniqueFd socket;                // once both sides have proven the secret
  bool somebody_listens = false;  // though the proof may have failed
  std::string problem;            // why there is no socket
  explicit operator bool() const { return static_cast<bool>(socket); }
};

// One attempt: connects, and both sides prove the secret.
[[nodiscard]] Knock connect_tcp_hub(const std::string& address, int port, const std::string& secret,
                                    std::chrono::milliseconds limit);

// The numeric address of this end.
[[nodiscard]] std::string own_address(int socket);
// Of the other end, "" where it is gone.
[[nodiscard]] std::string peer_address(int socket);

// All that the name or address means is of this host alone.
[[nodiscard]] bool is_loopback(const std::string& address);

}  // namespace hsdp::comm
