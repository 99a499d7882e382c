// How a rank waits for its peers: it spins briefly, then yields its core for a while, then sleeps
// on its bell, which peers ring only while it sleeps [Note: waiting].
//
// A long wait costs almost nothing, and more ranks than cores still work well. Every wait ends:
// with what it waited for, even if peers have left since, or with the world's failure. Control
// learns of every wait that reaches a sleep, and judges how long is too long.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "hsdp/comm/control.h"

namespace hsdp::comm {

// What one or several ranks sleep on. Lies in memory that their peers can write.
struct alignas(128) Bell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;

  // Wakes all sleepers. Call it after a sequentially consistent store of what they wait for.
  void ring_if_sleeping() {
    if (sleepers.load() != 0) ring();
  }
  void ring();
  // Sleeps until the next ring after `rings` was `seen`, for at most `at_most`.
  void sleep(std::uint32_t seen, std::chrono::milliseconds at_most);
};

inline void relax_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Where one rank's thread waits: what it sleeps on (by default only the bell), and what it has
// learned about yielding.
class Waiter {
 public:
  explicit Waiter(Bell& bell) : bell_(bell) {}
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  virtual ~Waiter() = default;
  [[nodiscard]] Bell& bell() { return bell_; }
  // Yields once; false if sleeping is better. When other processes compete for the cores, a yield
  // loses a whole time slice, which a sleeper does not: then it does not yield for a while.
  [[nodiscard]] bool yield();
  virtual void sleep(std::uint32_t seen, std::chrono::milliseconds at_most) {
    bell_.sleep(seen, at_most);
  }

 private:
  Bell& bell_;
  int waits_without_yield_ = 0;
};

// Announces one wait to Control while it sleeps.
class AnnouncedWait {
 public:
  AnnouncedWait(Control& control, WaitState state) : control_(control), state_(state) {}
  AnnouncedWait(const AnnouncedWait&) = delete;
  AnnouncedWait& operator=(const AnnouncedWait&) = delete;
  ~AnnouncedWait() { close(); }
  void waits_for(int peer);

 private:
  void close();

  Control& control_;
  WaitState state_;
  int slot_ = -1;
};

// Throws the world's failure, if any, and tells Control what it interrupts.
void throw_if_failed(Control& control, WaitState state);

// Waits until the world has failed, for at most `at_most`: a peer may know the cause better.
void wait_for_verdict(const Control& control, std::chrono::milliseconds at_most);

// Ends the world and throws why it ended: `failure`, unless another came first.
[[noreturn]] void end_world(Control& control, const Failure& failure, WaitState state);

// Returns when `ready()` is true. `ready` may do work; `peer()` is the world rank waited for, or
// -1.
template <typename Ready, typename Peer>
void wait_until(Control& control, Waiter& waiter, WaitState state, Ready&& ready, Peer&& peer) {
  constexpr int kSpins = 48;
  constexpr int kYields = 256;
  constexpr std::chrono::milliseconds kLongestSleep{50};
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) return;
    relax_core();
  }
  for (int i = 0; i < kYields && waiter.yield(); ++i) {
    if (ready()) return;
  }
  AnnouncedWait announced(control, state);
  for (;;) {
    const std::uint32_t seen = waiter.bell().rings.load();
    waiter.bell().sleepers.fetch_add(1);
    const bool done = ready();
    if (!done) announced.waits_for(peer());
    if (!done && !control.failed()) waiter.sleep(seen, kLongestSleep);
    waiter.bell().sleepers.fetch_sub(1);
    if (done) return;
    if (!control.failed()) continue;
    if (ready()) return;  // it came before the world ended
    control.throw_if_failed();
  }
}

}  // namespace hsdp::comm
