// Rank 0's TCP door at HSDP_ADDR:HSDP_PORT, for jobs on several hosts.
#pragma once

#include <chrono>
#include <string>

#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

// Throws UsageError, naming the variables to set, if address or secret is missing.
void require_tcp_settings(const LaunchEnvironment& launch);

// Returns a non-blocking listener. Throws Error if the address is not ours or the port is taken.
[[nodiscard]] UniqueFd listen_tcp_hub(const std::string& address, int port);

// The outcome of an attempt to reach rank 0.
struct Knock {
  UniqueFd socket;                // set if both sides have proven the secret
  bool somebody_listens = false;  // even if the proof failed
  std::string problem;            // why there is no socket
  explicit operator bool() const { return static_cast<bool>(socket); }
};

// Makes one attempt: connects, and both sides prove the secret.
[[nodiscard]] Knock connect_tcp_hub(const std::string& address, int port, const std::string& secret,
                                    std::chrono::milliseconds limit);

// The numeric address of this end.
[[nodiscard]] std::string own_address(int socket);
// The numeric address of the other end; "" if it is gone.
[[nodiscard]] std::string peer_address(int socket);

// Whether the name or address leads only to this host.
[[nodiscard]] bool is_loopback(const std::string& address);

}  // namespace hsdp::comm
