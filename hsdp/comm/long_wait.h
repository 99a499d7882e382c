// Detects a long wait: after two seconds a rank tells its neighbours what it has called, and again
// each time the waiting time has doubled.
#pragma once

#include <chrono>

namespace hsdp::comm {

class LongWait {
 public:
  using Clock = std::chrono::steady_clock;
  explicit LongWait(Clock::time_point begin = Clock::now()) : begin_(begin) {}

  // True once per doubling.
  [[nodiscard]] bool has_become_long() {
    if (Clock::now() - begin_ < patience_) return false;
    patience_ *= 2;
    return true;
  }
  // Makes the wait count as long now, because a peer probably makes another call.
  void hurry() { begin_ = Clock::now() - patience_; }

 private:
  Clock::time_point begin_;
  std::chrono::milliseconds patience_{2'000};
};

}  // namespace hsdp::comm
