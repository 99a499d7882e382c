// Messages from each rank of a group to all others at once, through shared memory: written once,
// read in place by every peer.
//
// Every peer must take every message. Never blocks, like Channel. Not thread-safe. Borrows the
// segments and the bells.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "hsdp/comm/host/host_wait.h"

namespace hsdp::comm {

// Zero is the right initial value.
struct alignas(64) MulticastCounter {
  std::atomic<std::uint64_t> messages;
};

// One rank's ring, as every member sees it.
struct MulticastRing {
  static constexpr std::size_t kSlots = 4;
  MulticastCounter* written = nullptr;   // written by the producer
  MulticastCounter* consumed = nullptr;  // one per rank of the group
  std::byte* slots = nullptr;            // kSlots messages
};

class Multicast {
 public:
  // `rings` and `bells` are indexed by group rank.
  Multicast(std::vector<MulticastRing> rings, std::vector<Bell*> bells, int rank,
            std::size_t message_bytes);

  // Where to write the next message; null while a peer has not taken the oldest one.
  [[nodiscard]] std::byte* reserve();
  void commit();
  // The next message from `rank`, valid until pop(rank); null while there is none.
  [[nodiscard]] const std::byte* front(int rank);
  void pop(int rank);

 private:
  struct Incoming {
    std::uint64_t taken = 0;
    std::uint64_t seen_written = 0;
  };

  std::vector<MulticastRing> rings_;
  std::vector<Bell*> bells_;
  std::size_t rank_;
  std::size_t message_bytes_;
  std::uint64_t written_ = 0;
  std::uint64_t seen_consumed_ = 0;  // by every peer
  std::vector<Incoming> incoming_;
};

}  // namespace hsdp::comm
