// How a rank waits for its peers: it spins for a moment, gives its core away for a while, then
// sleeps on its bell; the peers ring the bell only while it sleeps [Note: waiting].
//
// A rank that waits long costs nearly nothing, and more ranks than cores do not collapse. Every
// wait ends with what it waited for, though peers have left since, or with the world's failure; how
// long is too long is judged by Control, which is told of every wait that comes to a sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "hsdp/comm/control.h"

namespace hsdp::comm {

// What one rank or several sleep on. Lies in memory that their peers can write.
struct alignas(128) Bell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;

  // Wakes all. Call after a sequentially consistent store of what the sleepers wait for.
  void ring_if_sleeping() {
    if (sleepers.load() != 0) ring();
  }
  void ring();
  // Until the next ring after `rings` had the value `seen`, or the time is over.
  void sleep(std::uint32_t seen, std::chrono::milliseconds at_most);
};

inline void relax_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Where the thread of one rank waits: what it sleeps on (by default the bell alone), and what it
// has learned about yielding.
class Waiter {
 public:
  explicit Waiter(Bell& bell) : bell_(bell) {}
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;
  virtual ~Waiter() = default;
  [[nodiscard]] Bell& bell() { return bell_; }
  // Gives the core away once; false when it is better to sleep. Where strangers compete for the
  // cores, a yield loses a whole turn, which a sleeper does not: then no yields for a while.
  [[nodiscard]] bool yield();
  virtual void sleep(std::uint32_t seen, std::chrono::milliseconds at_most) {
    bell_.sleep(seen, at_most);
  }

 private:
  Bell& bell_;
  int waits_without_yield_ = 0;
};

// Tells Control of one wait while it sleeps.
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

// Throws what ended the world, if it ended, and lets Control know what it interrupts.
void throw_if_failed(Control& control, WaitState state);

// Until the world has failed, or that time is over: a peer may know better what is wrong.
void wait_for_verdict(const Control& control, std::chrono::milliseconds at_most);

// Ends the world and throws why it ended: `failure`, unless another was first.
[[noreturn]] void end_world(Control& control, const Failure& failure, WaitState state);

// Returns when `ready()` is true. `ready` may do work; `peer()` names the world rank waited for, or
// is -1.
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
    if (ready()) return;  // it came before the end of the world did
    control.throw_if_failed();
  }
}

}  // namespace hsdp::comm
