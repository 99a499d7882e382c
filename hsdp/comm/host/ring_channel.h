// A channel through shared memory: one ring of message slots in each direction.
//
// A ring lies in its producer's segment. The channel borrows both segments and the peer's bell.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "hsdp/comm/host/channel.h"
#include "hsdp/comm/host/host_wait.h"

namespace hsdp::comm {

// Zero is the right initial value.
struct RingCounters {
  alignas(128) std::atomic<std::uint64_t> written;   // messages written by the producer
  alignas(128) std::atomic<std::uint64_t> consumed;  // messages read by the consumer
};

struct Ring {
  static constexpr std::size_t kSlots = 4;
  RingCounters* counters = nullptr;
  std::byte* slots = nullptr;  // kSlots messages of message_bytes each
};

class RingChannel : public Channel {
 public:
  RingChannel(Ring outgoing, Ring incoming, std::size_t message_bytes, Bell& peer_bell)
      : out_(outgoing), in_(incoming), message_bytes_(message_bytes), peer_bell_(peer_bell) {}

  [[nodiscard]] std::byte* reserve() override;
  void commit(std::size_t size) override;
  [[nodiscard]] bool send(const std::byte* data, std::size_t size) override;
  [[nodiscard]] bool flush() override { return true; }
  [[nodiscard]] const std::byte* front(std::size_t size) override;
  void pop() override;
  [[nodiscard]] bool receive(std::byte* data, std::size_t size) override;

 private:
  Ring out_;
  Ring in_;
  std::size_t message_bytes_;
  Bell& peer_bell_;
  std::uint64_t written_ = 0;
  std::uint64_t seen_consumed_ = 0;
  std::uint64_t consumed_ = 0;
  std::uint64_t seen_written_ = 0;
};

}  // namespace hsdp::comm
