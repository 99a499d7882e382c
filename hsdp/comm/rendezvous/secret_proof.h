// One side of the mutual proof of a shared secret, without a socket: says what to send and how much
// to read next, so that blocking and asynchronous connections share the steps.
//
// Connecting side: hello, (their hello), proof, (their proof). Accepting side: (their hello),
// hello, (their proof), proof. The accepting side proves nothing to a stranger.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "hsdp/comm/rendezvous/handshake.h"

namespace hsdp::comm {

class SecretProof {
 public:
  enum class Step : std::uint8_t { kSend, kReceive, kProven, kRefused };

  SecretProof(HandshakeRole role, std::string secret, std::string context);

  [[nodiscard]] Step step() const { return step_; }
  // kSend: the bytes to send now; then call sent().
  [[nodiscard]] std::span<const std::uint8_t> outgoing() const { return outgoing_; }
  void sent();
  // kReceive: exactly this many bytes are expected; pass them to received().
  [[nodiscard]] std::size_t expected_bytes() const;
  void received(std::span<const std::uint8_t> bytes);

  // Whether the other side has shown that it speaks this protocol, and that it knows the secret.
  [[nodiscard]] bool is_greeted() const { return have_their_hello_; }
  [[nodiscard]] bool knows_peer() const { return proof_checked_; }

  static constexpr std::size_t kMaxFrameBytes = 40;

 private:
  static constexpr std::size_t kMacBytes = 32;
  using Mac = std::array<std::uint8_t, kMacBytes>;

  void prepare_hello();
  void prepare_proof();
  [[nodiscard]] Mac mac_of(HandshakeRole prover) const;

  HandshakeRole role_;
  std::string secret_;
  std::string context_;
  Step step_ = Step::kSend;
  bool have_their_hello_ = false;
  bool proof_sent_ = false;
  bool proof_checked_ = false;
  std::array<std::uint8_t, kMacBytes> own_nonce_{};
  std::array<std::uint8_t, kMacBytes> their_nonce_{};
  std::vector<std::uint8_t> outgoing_;
};

}  // namespace hsdp::comm
