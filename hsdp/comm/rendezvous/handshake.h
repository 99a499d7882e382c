// Mutual proof of a shared per-job secret over a fresh TCP connection: HMAC-SHA256 challenge and
// response (OpenSSL) before anything else is parsed [Note: handshake].
//
// Frames are of fixed size, so a stranger can neither make us allocate nor parse. It keeps
// strangers out; it neither encrypts nor signs what follows.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

namespace hsdp::comm {

enum class HandshakeRole : std::uint8_t { kConnecting, kAccepting };

// Blocking, on a connected socket, both sides at once; false when the other side does not know the
// secret, sends anything else, or does not answer by the deadline. `context` (who talks to whom and
// why, at most 64 bytes, equal on both sides) is bound into the proof. The socket's blocking mode
// is left as it was found.
[[nodiscard]] bool prove_secret(int socket, HandshakeRole role, const std::string& secret,
                                const std::string& context, std::chrono::milliseconds deadline);

// 32 random bytes as hex, from the system's generator.
[[nodiscard]] std::string random_secret();

}  // namespace hsdp::comm
