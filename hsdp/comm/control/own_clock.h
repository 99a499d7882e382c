// Time as this process experienced it: a stop (SIGSTOP, a suspended machine) counts as at most two
// ticks, so that a rank that was stopped and continued does not blame others for its own absence.
//
// One thread ticks; any thread may read.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace hsdp::comm {

class OwnClock {
 public:
  static constexpr std::chrono::milliseconds kTick{250};

  using Source = std::int64_t (*)(const void* of);  // monotonic milliseconds

  static std::int64_t steady_ms(const void* /*of*/) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  // A simulation passes another source.
  explicit OwnClock(Source source = steady_ms, const void* of = nullptr)
      : source_(source), of_(of), last_tick_ms_(source(of)) {}

  void tick() {
    const std::int64_t steady = source_(of_);
    lived_ms_.store(now().count(), std::memory_order_relaxed);
    last_tick_ms_.store(steady, std::memory_order_relaxed);
  }

  [[nodiscard]] std::chrono::milliseconds now() const {
    const std::int64_t since_tick = source_(of_) - last_tick_ms_.load(std::memory_order_relaxed);
    return std::chrono::milliseconds(lived_ms_.load(std::memory_order_relaxed) +
                                     std::clamp<std::int64_t>(since_tick, 0, 2 * kTick.count()));
  }

 private:
  Source source_;
  const void* of_;
  std::atomic<std::int64_t> lived_ms_{0};
  std::atomic<std::int64_t> last_tick_ms_;
};

}  // namespace hsdp::comm
