// The part of ControlLoop that runs on timers: heartbeats, watching rank 0, and the orderly end.
#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "hsdp/comm/control/control_loop.h"

namespace hsdp::comm {
using boost::system::error_code;

namespace {

// How much later than rank 0 a rank judges by itself: only where rank 0 cannot.
constexpr std::chrono::milliseconds kAfterHub{2'000};
// A wait for a rank that said goodbye may just be ending.
constexpr std::chrono::milliseconds kPatienceWithClosed{1'000};

}  // namespace

void ControlLoop::arm_tick() {
  tick_timer_.expires_after(OwnClock::kTick);
  tick_timer_.async_wait([this](error_code error) {
    if (error) return;
    tick();
    arm_tick();
  });
}

BeatFrame ControlLoop::own_beat() const {
  BeatFrame beat;
  for (const ActiveWait& wait : state_->active_waits()) {
    beat.waits.push_back({wait.id, std::string(wait.state.operation), wait.state.bucket,
                          wait.state.peer, wait.exchange, wait.age});
  }
  return beat;
}

void ControlLoop::tick() {
  state_->clock().tick();
  if (own_.size == 1) return;
  if (hub_) {
    hub_->handle(0, FrameType::kBeat, own_beat().encode());
    return hub_->tick();
  }
  if (link_->open() && link_->idle()) {
    link_->send(make_frame(FrameType::kBeat, own_beat().encode()));
  }
  if (!state_->failed()) watch_hub();
}

void ControlLoop::watch_hub() {
  const Millis silent = state_->clock().now() - hub_heard_;
  if (!hub_left_ && silent >= timeout_) {
    WorldEnd world_end;
    world_end.failure = {FailureKind::kTimeout,
                         ranks_text({0}, own_.size) +
                             " is stopped or unreachable: no sign of life for " +
                             seconds_text(silent),
                         {0}};
    world_end.bare = true;
    return fail(world_end);
  }
  const Millis since_left = state_->clock().now() - hub_left_at_;
  for (const ActiveWait& wait : state_->active_waits()) {
    // Without rank 0 no exchange is ever answered.
    const bool for_hub =
        wait.exchange != 0 ||
        (wait.state.peer == 0 && std::min(wait.age, since_left) >= kPatienceWithClosed);
    if (hub_left_ && for_hub) return fail(end_by_loss(0, own_.size, "it closed its world"));
    if (wait.age < timeout_ + kAfterHub) continue;
    WorldEnd world_end;
    world_end.failure.kind = FailureKind::kTimeout;
    world_end.bare = true;
    if (!welcomed_) world_end.failure.ranks = missing_;
    if (wait.state.peer >= 0) world_end.failure.ranks = {wait.state.peer};
    world_end.failure.message =
        (world_end.failure.ranks.empty()
             ? "no answer"
             : ranks_text(world_end.failure.ranks, own_.size) + " did not arrive") +
        " within " + seconds_text(wait.age);
    return fail(world_end);
  }
}

void ControlLoop::stop() {
  if (!thread_.joinable()) return;
  boost::asio::post(io_, [this] { begin_stop(); });
  thread_.join();
  // What handlers hold of this object goes before its members do.
  leader_watch_.reset();
  hub_watch_.reset();
  broker_.reset();
  if (descriptors_) descriptors_->close();
  listener_.reset();
  if (link_) link_->close();
}

void ControlLoop::begin_stop() {
  stop_ = Stop::kWaiting;
  stop_began_ = std::chrono::steady_clock::now();
  if (!state_->failed()) to_hub(FrameType::kGoodbye, {});
  continue_stop();
}

// A rank may go at once. The hub stays while others may still need it: until they have said
// goodbye, or, when the world ended during the rendezvous, until latecomers have been told; but not
// for long.
bool ControlLoop::may_stop_sending() const {
  if (!hub_) return true;
  constexpr Millis kForLatecomers{1'000};
  constexpr Millis kForOthers{2'000};
  const auto waited = std::chrono::steady_clock::now() - stop_began_;
  if (!hub_->ended()) return hub_->all_closed() || waited >= kForOthers;
  return hub_->all_joined() || hub_->missing().empty() || waited >= kForLatecomers;
}

bool ControlLoop::all_gone() const { return hub_ ? hub_->all_gone() : !link_->open(); }

void ControlLoop::continue_stop() {
  constexpr Millis kForFlushing{500};
  constexpr Millis kStep{2};
  const auto now = std::chrono::steady_clock::now();
  if (stop_ == Stop::kWaiting && may_stop_sending()) {
    stop_ = Stop::kFlushing;
    stop_began_ = now;
    if (hub_) {
      hub_->leave();
      hub_->finish_sending();
    } else {
      link_->finish_sending();
    }
  }
  if (stop_ == Stop::kFlushing && (all_gone() || now - stop_began_ >= kForFlushing)) {
    work_.reset();
    return io_.stop();
  }
  stop_timer_.expires_after(kStep);
  stop_timer_.async_wait([this](error_code error) {
    if (!error) continue_stop();
  });
}

}  // namespace hsdp::comm
