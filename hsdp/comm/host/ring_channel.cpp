#include "hsdp/comm/host/ring_channel.h"

#include <cstring>

#include "hsdp/comm/host/host_call.h"

namespace hsdp::comm {
std::byte* RingChannel::reserve() {
  if (written_ - seen_consumed_ == Ring::kSlots) {
    seen_consumed_ = out_.counters->consumed.load();
    if (written_ - seen_consumed_ == Ring::kSlots) return nullptr;
  }
  return out_.slots + written_ % Ring::kSlots * message_bytes_;
}

// Clears the bytes after a short message, so that a peer cannot take them for a call.
void RingChannel::commit(std::size_t size) {
  if (size < sizeof(HostCall)) std::memset(reserve() + size, 0, sizeof(HostCall) - size);
  out_.counters->written.store(++written_);
  peer_bell_.ring_if_sleeping();
}

bool RingChannel::send(const std::byte* data, std::size_t size) {
  std::byte* const place = reserve();
  if (place == nullptr) return false;
  std::memcpy(place, data, size);
  commit(size);
  return true;
}

const std::byte* RingChannel::front(std::size_t /*size*/) {
  if (seen_written_ == consumed_) {
    seen_written_ = in_.counters->written.load();
    if (seen_written_ == consumed_) return nullptr;
  }
  return in_.slots + consumed_ % Ring::kSlots * message_bytes_;
}

void RingChannel::pop() {
  in_.counters->consumed.store(++consumed_);
  peer_bell_.ring_if_sleeping();
}

bool RingChannel::receive(std::byte* data, std::size_t size) {
  const std::byte* const message = front(size);
  if (message == nullptr) return false;
  std::memcpy(data, message, size);
  pop();
  return true;
}

}  // namespace hsdp::comm
