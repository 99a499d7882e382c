// Retries until a deadline: for peers that are not ready yet and for the limit of open files.
#pragma once

#include <chrono>

#include "hsdp/comm/descriptor_limit.h"

namespace hsdp::comm {

// Pauses between attempts: each about twice as long as the one before, up to 100 ms, and different
// on every rank, so that ranks refused together do not return together.
class Pauses {
 public:
  // Sleeps. Returns false immediately if the pause would end after `end`.
  [[nodiscard]] bool sleep_before(std::chrono::steady_clock::time_point end);

 private:
  std::chrono::microseconds next_{1'000};
};

// Calls `attempt` until it returns something, and returns that, or the last result at the deadline.
// Throws DescriptorLimitError if the limit stopped the last attempt.
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

// Calls `open`, again while it hits the limit of open files, and returns its result.
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
