#include "hsdp/comm/host/ring_layout.h"

#include <algorithm>
#include <bit>

#include "hsdp/comm/host/page.h"

namespace hsdp::comm {
namespace {

constexpr std::size_t kRingsBytes = std::size_t{1} << 20;
constexpr std::size_t kLargestMessageBytes = std::size_t{128} << 10;
constexpr std::size_t kSmallestMessageBytes = std::size_t{4} << 10;
static_assert(Ring::kSlots == MulticastRing::kSlots);

}  // namespace

// size - 1 rings, one per peer, and one for all.
RingLayout::RingLayout(int size)
    : size_(static_cast<std::size_t>(size)),
      message_bytes_(std::clamp(std::bit_floor(kRingsBytes / Ring::kSlots / size_),
                                kSmallestMessageBytes, kLargestMessageBytes)) {}

std::size_t RingLayout::counters_bytes() const {
  const std::size_t bytes = size_ * sizeof(RingCounters) + (1 + size_) * sizeof(MulticastCounter);
  return whole_pages(bytes);
}

std::size_t RingLayout::segment_bytes() const {
  return counters_bytes() + size_ * Ring::kSlots * message_bytes_;
}

Ring RingLayout::ring(std::byte* segment, int peer_index) const {
  const auto index = static_cast<std::size_t>(peer_index);
  return {reinterpret_cast<RingCounters*>(segment) + index,
          segment + counters_bytes() + index * Ring::kSlots * message_bytes_};
}

MulticastRing RingLayout::multicast(std::byte* segment) const {
  auto* const counters =
      reinterpret_cast<MulticastCounter*>(segment + size_ * sizeof(RingCounters));
  return {counters, counters + 1,
          segment + counters_bytes() + (size_ - 1) * Ring::kSlots * message_bytes_};
}

}  // namespace hsdp::comm
