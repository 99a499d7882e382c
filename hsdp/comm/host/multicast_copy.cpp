#include "hsdp/comm/host/multicast_copy.h"

#include <algorithm>
#include <cstring>

namespace hsdp::comm {

void MulticastCopy::send(const void* data, std::size_t size) {
  out_ = static_cast<const std::byte*>(data);
  out_left_ = size;
}

void MulticastCopy::receive(int rank, void* data, std::size_t size) {
  incoming_[static_cast<std::size_t>(rank)] = {static_cast<std::byte*>(data), size};
}

bool MulticastCopy::step() {
  Multicast& multicast = *group_.multicast();
  bool moved = false;
  std::byte* const place = out_left_ > 0 ? multicast.reserve() : nullptr;
  if (place != nullptr) {
    const std::size_t size = std::min(out_left_, group_.message_bytes());
    std::memcpy(place, out_, size);
    multicast.commit();
    out_ += size;
    out_left_ -= size;
    moved = true;
  }
  if (out_left_ > 0) waits_for_ = (group_.rank() + 1) % group_.size();
  for (int distance = 1; distance < group_.size(); ++distance) {
    const int rank = (group_.rank() + distance) % group_.size();
    Incoming& incoming = incoming_[static_cast<std::size_t>(rank)];
    if (incoming.left == 0) continue;
    const std::byte* const message = multicast.front(rank);
    if (message == nullptr) {
      waits_for_ = rank;
      continue;
    }
    const std::size_t size = std::min(incoming.left, group_.message_bytes());
    std::memcpy(incoming.data, message, size);
    multicast.pop(rank);
    incoming.data += size;
    incoming.left -= size;
    moved = true;
  }
  return moved;
}

bool MulticastCopy::complete() const {
  return out_left_ == 0 && std::ranges::all_of(incoming_, [](const Incoming& incoming) {
           return incoming.left == 0;
         });
}

void MulticastCopy::run() {
  while (!complete()) {
    group_.wait([this] { return step(); }, [this] { return waits_for_; });
  }
}

}  // namespace hsdp::comm
