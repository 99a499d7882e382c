// Where the rings of one rank lie in its segment: counters first, then the slots.
#pragma once

#include <cstddef>

#include "hsdp/comm/host/multicast.h"
#include "hsdp/comm/host/ring_channel.h"

namespace hsdp::comm {

class RingLayout {
 public:
  // Divides 1 MiB among a rank's rings, so messages are smaller in larger groups.
  explicit RingLayout(int size);
  [[nodiscard]] std::size_t message_bytes() const { return message_bytes_; }
  [[nodiscard]] std::size_t segment_bytes() const;
  // The ring from the segment's owner to its `peer_index`-th peer.
  [[nodiscard]] Ring ring(std::byte* segment, int peer_index) const;
  // The ring from the segment's owner to all peers.
  [[nodiscard]] MulticastRing multicast(std::byte* segment) const;

 private:
  [[nodiscard]] std::size_t counters_bytes() const;

  std::size_t size_;
  std::size_t message_bytes_;
};

}  // namespace hsdp::comm
