// A wait that has become long: after two seconds a rank tells its neighbours what it has called,
// and again each time it has waited twice as long.
#pragma once

#include <chrono>

namespace hsdp::comm {

class LongWait {
 public:
  using Clock = std::chrono::steady_clock;
  explicit LongWait(Clock::time_point begin = Clock::now()) : begin_(begin) {}

  // True once each time.
  [[nodiscard]] bool has_become_long() {
    if (Clock::now() - begin_ < patience_) return false;
    patience_ *= 2;
    return true;
  }
  // It is long now: there is reason to think that a peer makes another call.
  void hurry() { begin_ = Clock::now() - patience_; }

 private:
  Clock::time_point begin_;
  std::chrono::milliseconds patience_{2'000};
};

}  // namespace hsdp::comm
