// The part of ControlLoop that runs on timers: heartbeats, watching rank 0, and the orderly end.
#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "hsdp/comm/control/control_loop.h"

namespace hsdp::comm {
using boost::system::error_code;

void ControlLoop::arm_tick() {
  tick_timer_.expires_after(OwnClock::kTick);
  tick_timer_.async_wait([this](error_code error) {
    if (error) return;
    tick();
    arm_tick();
  });
}

void ControlLoop::tick() {
  state_->clock().tick();
  if (own_.size == 1) return;
  if (hub_) {
    hub_->handle(0, FrameType::kBeat, member_.beat().encode());
    return hub_->tick();
  }
  if (link_->open() && link_->idle()) {
    link_->send(make_frame(FrameType::kBeat, member_.beat().encode()));
  }
  member_.tick();
}

void ControlLoop::stop() {
  if (!thread_.joinable()) return;
  boost::asio::post(io_, [this] { begin_stop(); });
  thread_.join();
  // What handlers hold of this object goes before its members do.
  leader_watch_.reset();
  hub_watch_.reset();
  watches_.clear();
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
