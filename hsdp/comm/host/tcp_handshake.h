// Turns a connection between two ranks of a group into a link: the caller says which rank it is,
// then both sides prove that they know the listener's token and the job's secret.
//
// Owns the socket and never blocks. Fixed frame sizes: a stranger cannot make us parse anything.
#pragma once

#include <poll.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/rendezvous/secret_proof.h"
#include "hsdp/comm/unique_fd.h"

namespace hsdp::comm {

class TcpHandshake {
 public:
  enum class State : std::uint8_t { kWaiting, kProven, kBroken };
  // What a caller with that group rank must prove; empty if that caller is not expected.
  using ProofFor = std::function<std::optional<SecretProof>(int caller)>;

  // The caller's side. The socket is non-blocking and may still be connecting.
  TcpHandshake(UniqueFd socket, int own_rank, SecretProof proof);
  // The listener's side of a non-blocking socket.
  TcpHandshake(UniqueFd socket, ProofFor proof_for);

  // Continues as far as the socket allows. Call it when what it waits for has arrived.
  State advance();
  [[nodiscard]] pollfd awaited() const { return {socket_.get(), events_, 0}; }

  // Whether the other side has answered.
  [[nodiscard]] bool is_connected() const { return greeted_ || done_ > 0; }

  // The caller's group rank, once proven.
  [[nodiscard]] int caller() const { return static_cast<int>(hello_.caller); }
  [[nodiscard]] UniqueFd take_socket();
  // Why it failed.
  [[nodiscard]] const std::string& problem() const { return problem_; }

 private:
  // The first frame on every connection.
  struct Hello {
    static constexpr std::array<char, 8> kMagic{'h', 's', 'd', 'p', 't', 'c', 'p', '2'};
    std::array<char, 8> magic{};
    std::uint32_t caller = 0;
    std::uint32_t unused = 0;
  };
  static_assert(sizeof(Hello) == 16);

  [[nodiscard]] bool greet();
  // True when all bytes have been moved; `done_` counts within the frame.
  [[nodiscard]] bool send(std::span<const std::uint8_t> frame);
  [[nodiscard]] bool receive(std::span<std::uint8_t> frame);
  template <typename Byte, typename Move>
  [[nodiscard]] bool move_all(std::span<Byte> frame, Move move, short events);
  // After a failed system call: waits for `events`, or gives up.
  void wait_or_break(short events);
  void break_off(std::string problem);

  UniqueFd socket_;
  ForkGuard fork_guard_;
  ProofFor proof_for_;  // null on the caller's side
  std::optional<SecretProof> proof_;
  Hello hello_;
  bool greeted_ = false;
  std::array<std::uint8_t, SecretProof::kMaxFrameBytes> frame_{};
  std::size_t done_ = 0;
  short events_ = POLLIN;
  State state_ = State::kWaiting;
  std::string problem_;
};

}  // namespace hsdp::comm
