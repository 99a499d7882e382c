// What the threads of this rank are waiting for, published with each heartbeat.
//
// begin() and end() are a few atomic writes, from any thread; active() may run beside them. When
// all slots are taken a wait goes unpublished (begin() returns -1), and nothing else changes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string_view>
#include <vector>

#include "hsdp/comm/control.h"

namespace hsdp::comm {

struct ActiveWait {
  std::uint32_t id = 0;  // differs from wait to wait of one rank
  WaitState state;
  std::uint64_t exchange = 0;  // of a collect(), 0: none
  std::chrono::milliseconds age{0};
};

class WaitSlots {
 public:
  // `now` is the rank's own clock; `state.operation` is static text.
  [[nodiscard]] int begin(const WaitState& state, std::uint64_t exchange,
                          std::chrono::milliseconds now);
  void end(int slot);
  // Oldest first.
  [[nodiscard]] std::vector<ActiveWait> active(std::chrono::milliseconds now) const;

 private:
  static constexpr std::uint32_t kFree = 0;
  static constexpr std::uint32_t kClaimed = 1;  // larger values: the id of the wait

  struct Slot {
    std::atomic<std::uint32_t> id{kFree};
    std::atomic<const char*> operation{nullptr};
    std::atomic<std::size_t> operation_length{0};
    std::atomic<int> bucket{-1};
    std::atomic<int> peer{-1};
    std::atomic<std::uint64_t> exchange{0};
    std::atomic<std::int64_t> start_ms{0};
  };

  std::array<Slot, 64> slots_;
  std::atomic<std::uint32_t> next_id_{kClaimed + 1};
};

}  // namespace hsdp::comm
