#include "hsdp/comm/host/host_wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <thread>

namespace hsdp::comm {
namespace {

std::uint32_t* futex_word(std::atomic<std::uint32_t>& word) {
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
  return reinterpret_cast<std::uint32_t*>(&word);
}

}  // namespace

void Bell::ring() {
  rings.fetch_add(1);
  ::syscall(SYS_futex, futex_word(rings), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep(std::uint32_t seen, std::chrono::milliseconds at_most) {
  const std::timespec limit{.tv_sec = at_most.count() / 1000,
                            .tv_nsec = at_most.count() % 1000 * 1'000'000};
  ::syscall(SYS_futex, futex_word(rings), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

bool Waiter::yield() {
  constexpr std::chrono::milliseconds kLostTurn{1};
  constexpr int kWaitsAfterLostTurn = 16;
  if (waits_without_yield_ > 0) {
    --waits_without_yield_;
    return false;
  }
  const auto start = std::chrono::steady_clock::now();
  ::sched_yield();
  if (std::chrono::steady_clock::now() - start > kLostTurn) {
    waits_without_yield_ = kWaitsAfterLostTurn;
  }
  return true;
}

void AnnouncedWait::waits_for(int peer) {
  if (slot_ >= 0 && state_.peer == peer) return;
  close();
  state_.peer = peer;
  slot_ = control_.begin_wait(state_);
}

void throw_if_failed(Control& control, WaitState state) {
  if (!control.failed()) return;
  AnnouncedWait announced(control, state);
  announced.waits_for(state.peer);
  control.throw_if_failed();
}

void wait_for_verdict(const Control& control, std::chrono::milliseconds at_most) {
  const auto end = std::chrono::steady_clock::now() + at_most;
  while (!control.failed() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void end_world(Control& control, const Failure& failure, WaitState state) {
  control.fail(failure);
  wait_for_verdict(control, std::chrono::seconds(2));  // time for a message to rank 0 and back
  throw_if_failed(control, state);
  throw_failure(failure);
}

void AnnouncedWait::close() {
  if (slot_ >= 0) control_.end_wait(slot_);
  slot_ = -1;
}

}  // namespace hsdp::comm
