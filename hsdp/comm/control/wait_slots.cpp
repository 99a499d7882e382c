#include "hsdp/comm/control/wait_slots.h"

#include <algorithm>

namespace hsdp::comm {

int WaitSlots::begin(const WaitState& state, std::uint64_t exchange,
                     std::chrono::milliseconds now) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    std::uint32_t expected = kFree;
    if (!slot.id.compare_exchange_strong(expected, kClaimed, std::memory_order_acquire)) continue;
    slot.operation.store(state.operation.data(), std::memory_order_relaxed);
    slot.operation_length.store(state.operation.size(), std::memory_order_relaxed);
    slot.bucket.store(state.bucket, std::memory_order_relaxed);
    slot.peer.store(state.peer, std::memory_order_relaxed);
    slot.exchange.store(exchange, std::memory_order_relaxed);
    slot.start_ms.store(now.count(), std::memory_order_relaxed);
    std::uint32_t id = next_id_.fetch_add(1, std::memory_order_relaxed);
    if (id <= kClaimed) id = next_id_.fetch_add(2, std::memory_order_relaxed) + 2;
    slot.id.store(id, std::memory_order_release);
    return static_cast<int>(i);
  }
  return -1;
}

void WaitSlots::end(int slot) {
  if (slot < 0) return;
  slots_[static_cast<std::size_t>(slot)].id.store(kFree, std::memory_order_release);
}

std::vector<ActiveWait> WaitSlots::active(std::chrono::milliseconds now) const {
  std::vector<ActiveWait> waits;
  for (const Slot& slot : slots_) {
    const std::uint32_t id = slot.id.load(std::memory_order_acquire);
    if (id <= kClaimed) continue;
    ActiveWait wait;
    wait.id = id;
    const char* const operation = slot.operation.load(std::memory_order_acquire);
    const std::size_t length = slot.operation_length.load(std::memory_order_acquire);
    wait.state.bucket = slot.bucket.load(std::memory_order_acquire);
    wait.state.peer = slot.peer.load(std::memory_order_acquire);
    wait.exchange = slot.exchange.load(std::memory_order_acquire);
    const std::int64_t start_ms = slot.start_ms.load(std::memory_order_acquire);
    // Reused meanwhile: what was read may be of two waits, the text pointer and its length too.
    if (slot.id.load(std::memory_order_relaxed) != id) continue;
    wait.state.operation = std::string_view(operation, length);
    wait.age = std::max(now - std::chrono::milliseconds(start_ms), std::chrono::milliseconds(0));
    waits.push_back(wait);
  }
  std::sort(waits.begin(), waits.end(),
            [](const ActiveWait& a, const ActiveWait& b) { return a.age > b.age; });
  return waits;
}

}  // namespace hsdp::comm
