// Mutual proof of a shared per-job secret over a new TCP connection: HMAC-SHA256 challenge and
// response (OpenSSL) before anything else is parsed [Note: handshake].
//
// Frames have fixed sizes, so a stranger can make us neither allocate nor parse. The handshake
// keeps strangers out; it neither encrypts nor signs what follows.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

namespace hsdp::comm {

enum class HandshakeRole : std::uint8_t { kConnecting, kAccepting };

// Blocking, on a connected socket; both sides call it. Returns false if the other side does not
// know the secret, sends anything else, or does not answer by the deadline. `context` (who talks to
// whom and why, at most 64 bytes, equal on both sides) is part of the proof. Restores the socket's
// blocking mode.
[[nodiscard]] bool prove_secret(int socket, HandshakeRole role, const std::string& secret,
                                const std::string& context, std::chrono::milliseconds deadline);

// 32 random bytes as hex, from the system's generator.
[[nodiscard]] std::string random_secret();

}  // namespace hsdp::comm
