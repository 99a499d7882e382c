#include "hsdp/comm/host/multicast.h"

#include <algorithm>

namespace hsdp::comm {

Multicast::Multicast(std::vector<MulticastRing> rings, std::vector<Bell*> bells, int rank,
                     std::size_t message_bytes)
    : rings_(std::move(rings)),
      bells_(std::move(bells)),
      rank_(static_cast<std::size_t>(rank)),
      message_bytes_(message_bytes),
      incoming_(rings_.size()) {}

std::byte* Multicast::reserve() {
  const MulticastRing& ring = rings_[rank_];
  if (written_ - seen_consumed_ == MulticastRing::kSlots) {
    std::uint64_t slowest = written_;
    for (std::size_t r = 0; r < rings_.size(); ++r) {
      if (r != rank_) slowest = std::min(slowest, ring.consumed[r].messages.load());
    }
    seen_consumed_ = slowest;
    if (written_ - seen_consumed_ == MulticastRing::kSlots) return nullptr;
  }
  return ring.slots + written_ % MulticastRing::kSlots * message_bytes_;
}

void Multicast::commit() {
  rings_[rank_].written->messages.store(++written_);
  for (std::size_t r = 0; r < bells_.size(); ++r) {
    if (r != rank_) bells_[r]->ring_if_sleeping();
  }
}

const std::byte* Multicast::front(int rank) {
  const auto index = static_cast<std::size_t>(rank);
  Incoming& incoming = incoming_[index];
  if (incoming.seen_written == incoming.taken) {
    incoming.seen_written = rings_[index].written->messages.load();
    if (incoming.seen_written == incoming.taken) return nullptr;
  }
  return rings_[index].slots + incoming.taken % MulticastRing::kSlots * message_bytes_;
}

void Multicast::pop(int rank) {
  const auto index = static_cast<std::size_t>(rank);
  rings_[index].consumed[rank_].messages.store(++incoming_[index].taken);
  bells_[index]->ring_if_sleeping();
}

}  // namespace hsdp::comm
