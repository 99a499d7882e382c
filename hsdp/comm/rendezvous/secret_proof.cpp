#include "hsdp/comm/rendezvous/secret_proof.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <algorithm>
#include <utility>

#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

constexpr std::array<std::uint8_t, 8> kMagic{'h', 's', 'd', 'p', 'h', 's', 'k', '1'};

void fill_random(std::span<std::uint8_t> bytes) {
  if (::RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1) {
    throw Error("handshake: the system's random generator failed");
  }
}

}  // namespace

SecretProof::SecretProof(HandshakeRole role, std::string secret, std::string context)
    : role_(role), secret_(std::move(secret)), context_(std::move(context)) {
  fill_random(own_nonce_);
  if (role_ == HandshakeRole::kConnecting) {
    prepare_hello();
  } else {
    step_ = Step::kReceive;
  }
}

void SecretProof::prepare_hello() {
  outgoing_.assign(kMagic.begin(), kMagic.end());
  outgoing_.insert(outgoing_.end(), own_nonce_.begin(), own_nonce_.end());
  step_ = Step::kSend;
}

void SecretProof::prepare_proof() {
  const Mac mac = mac_of(role_);
  outgoing_.assign(mac.begin(), mac.end());
  proof_sent_ = true;
  step_ = Step::kSend;
}

void SecretProof::sent() {
  if (step_ != Step::kSend) return;
  step_ = proof_checked_ && proof_sent_ ? Step::kProven : Step::kReceive;
}

std::size_t SecretProof::expected_bytes() const {
  return have_their_hello_ ? kMacBytes : kMagic.size() + kMacBytes;
}

void SecretProof::received(std::span<const std::uint8_t> bytes) {
  if (step_ != Step::kReceive || bytes.size() != expected_bytes()) {
    step_ = Step::kRefused;
    return;
  }
  if (!have_their_hello_) {
    have_their_hello_ = std::equal(kMagic.begin(), kMagic.end(), bytes.begin());
    std::copy(bytes.begin() + kMagic.size(), bytes.end(), their_nonce_.begin());
    if (!have_their_hello_) {
      step_ = Step::kRefused;
    } else if (role_ == HandshakeRole::kConnecting) {
      prepare_proof();
    } else {
      prepare_hello();
    }
    return;
  }
  const Mac expected = mac_of(role_ == HandshakeRole::kConnecting ? HandshakeRole::kAccepting
                                                                  : HandshakeRole::kConnecting);
  if (::CRYPTO_memcmp(expected.data(), bytes.data(), kMacBytes) != 0) {
    step_ = Step::kRefused;
    return;
  }
  proof_checked_ = true;
  if (proof_sent_) {
    step_ = Step::kProven;
  } else {
    prepare_proof();
  }
}

// The proof covers the prover's role, both nonces and the context, so it cannot be reflected,
// replayed, or used for another purpose.
SecretProof::Mac SecretProof::mac_of(HandshakeRole prover) const {
  const bool connecting = role_ == HandshakeRole::kConnecting;
  const auto& first = connecting ? own_nonce_ : their_nonce_;
  const auto& second = connecting ? their_nonce_ : own_nonce_;
  std::string text(1, prover == HandshakeRole::kConnecting ? 'c' : 'a');
  text.append(first.begin(), first.end());
  text.append(second.begin(), second.end());
  text.append(context_);
  Mac mac{};
  unsigned int length = 0;
  if (::HMAC(::EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
             reinterpret_cast<const std::uint8_t*>(text.data()), text.size(), mac.data(),
             &length) == nullptr ||
      length != kMacBytes) {
    throw Error("handshake: HMAC-SHA256 failed");
  }
  return mac;
}

std::string random_secret() {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::array<std::uint8_t, 32> bytes{};
  fill_random(bytes);
  std::string text;
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4U];
    text += kDigits[byte & 15U];
  }
  return text;
}

}  // namespace hsdp::comm
