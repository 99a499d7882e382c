// Trying again until a time: what peers are not ready for yet, and what the limit of open files
// forbids for now.
#pragma once

#include <chrono>

#include "hsdp/comm/descriptor_limit.h"

namespace hsdp::comm {

// Pauses between attempts: each about twice as long as the one before, up to 100 ms, and different
// on every rank, so that ranks that were turned away together do not come again together.
class Pauses {
 public:
  // Sleeps; false, at once, when the pause would last beyond `end`.
  [[nodiscard]] bool sleep_before(std::chrono::steady_clock::time_point end);

 private:
  std::chrono::microseconds next_{1'000};
};

// Calls `attempt` until it gives something, and returns that; what the last attempt gave when the
// time is over. Throws DescriptorLimitError when the limit stopped the last attempt.
template <typename Attempt>
auto retry_until(std::chrono::steady_clock::time_point end, Attempt attempt)
    -> decltype(attempt()) {
  for (Pauses pauses;;) {
    try {
      auto result = attempt();
      if (result || !pauses.sleep_before(end)) return result;
    } catch (const DescriptorLimitError&) {
      if (!pauses.sleep_before(end)) throw;
    }
  }
}

// Calls `open`, again while it meets the limit of open files, and returns what it gives.
template <typename Open>
auto wait_out_limit(std::chrono::steady_clock::time_point end, Open open) -> decltype(open()) {
  for (Pauses pauses;;) {
    try {
      return open();
    } catch (const DescriptorLimitError&) {
      if (!pauses.sleep_before(end)) throw;
    }
  }
}

}  // namespace hsdp::comm
