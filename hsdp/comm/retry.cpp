#include "hsdp/comm/retry.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>

namespace hsdp::comm {
namespace {

using Micros = std::chrono::microseconds;

// A random pause, from half to one and a half of `pause`.
Micros spread(Micros pause) {
  thread_local std::minstd_rand random(static_cast<unsigned>(
      ::getpid() ^ std::chrono::steady_clock::now().time_since_epoch().count()));
  return pause / 2 + Micros(random() % static_cast<std::uint64_t>(pause.count() + 1));
}

}  // namespace

bool Pauses::sleep_before(std::chrono::steady_clock::time_point end) {
  constexpr Micros kLongest{100'000};
  const Micros pause = spread(next_);
  next_ = std::min(2 * next_, kLongest);
  if (std::chrono::steady_clock::now() + pause >= end) return false;
  std::this_thread::sleep_for(pause);
  return true;
}

}  // namespace hsdp::comm
