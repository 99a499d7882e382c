#include "hsdp/comm/control/wait_slots.h"

#include <algorithm>

namespace hsdp::comm {

int WaitSlots::begin(const WaitState& state, std::uint64_t exchange,
                     std::chrono::milliseconds now) {
  const std::lock_guard lock(mutex_);
  auto slot =
      std::find_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.wait.id == 0; });
  if (slot == slots_.end()) slot = slots_.emplace(slots_.end());
  if (++last_id_ == 0) ++last_id_;
  slot->wait.id = last_id_;
  slot->wait.operation.assign(state.operation);
  slot->wait.bucket = state.bucket;
  slot->wait.peer = state.peer;
  slot->wait.exchange = exchange;
  slot->start = now;
  return static_cast<int>(slot - slots_.begin());
}

void WaitSlots::end(int slot) {
  const std::lock_guard lock(mutex_);
  slots_[static_cast<std::size_t>(slot)].wait.id = 0;
}

std::vector<ActiveWait> WaitSlots::active(std::chrono::milliseconds now) const {
  std::vector<ActiveWait> waits;
  {
    const std::lock_guard lock(mutex_);
    for (const Slot& slot : slots_) {
      if (slot.wait.id == 0) continue;
      waits.push_back(slot.wait);
      waits.back().age = std::max(now - slot.start, std::chrono::milliseconds(0));
    }
  }
  std::sort(waits.begin(), waits.end(),
            [](const ActiveWait& a, const ActiveWait& b) { return a.age > b.age; });
  return waits;
}

}  // namespace hsdp::comm
