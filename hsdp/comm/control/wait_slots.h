// What the threads of this rank are waiting for, published with each heartbeat. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "hsdp/comm/control.h"

namespace hsdp::comm {

struct ActiveWait {
  std::uint32_t id = 0;   // unique among the waits of a rank
  std::string operation;  // from WaitState, like bucket and peer
  int bucket = -1;
  int peer = -1;
  std::uint64_t exchange = 0;  // of a collect(); 0: none
  std::chrono::milliseconds age{0};
};

class WaitSlots {
 public:
  // `now` is the rank's OwnClock. Returns the slot for end().
  [[nodiscard]] int begin(const WaitState& state, std::uint64_t exchange,
                          std::chrono::milliseconds now);
  void end(int slot);
  // Oldest first.
  [[nodiscard]] std::vector<ActiveWait> active(std::chrono::milliseconds now) const;

 private:
  struct Slot {
    ActiveWait wait;  // its id is 0 while the slot is free
    std::chrono::milliseconds start{0};
  };

  mutable std::mutex mutex_;
  std::vector<Slot> slots_;  // reused, since waits are frequent and their texts rarely change
  std::uint32_t last_id_ = 0;
};

}  // namespace hsdp::comm
