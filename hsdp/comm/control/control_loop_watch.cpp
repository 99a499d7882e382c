// ControlLoop's timers: heartbeats, the watch over rank 0, and the orderly exit.
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
  const bool may_beat = link_->open() && link_->idle();
  if (relay_ && relay_->entered()) {
    relay_->handle(own_.rank, FrameType::kBeat, member_.beat().encode());
    relay_->tick(may_beat);
  } else if (may_beat) {
    link_->send(make_frame(FrameType::kBeat, member_.beat().encode()));
  }
  member_.tick();
}

void ControlLoop::stop() {
  if (!thread_.joinable()) return;
  boost::asio::post(io_, [this] { begin_stop(); });
  thread_.join();
  // Handlers refer to this object, so destroy them before its members.
  leader_watch_.reset();
  parent_watch_.reset();
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

// A rank without children may go immediately. Others stay for a bounded time, as they may be
// needed: a relay until its ranks have said goodbye or know how the world ended; the hub, if the
// rendezvous failed, until latecomers have been told.
bool ControlLoop::may_stop_sending() const {
  constexpr Millis kForVerdict{500};
  constexpr Millis kForLatecomers{1'000};
  constexpr Millis kForOthers{2'000};
  const auto waited = std::chrono::steady_clock::now() - stop_began_;
  if (!hub_) {
    if (!relay_ || relay_->all_closed() || relay_->ended()) return true;
    return waited >= (state_->failed() ? kForVerdict : kForOthers);
  }
  if (!hub_->ended()) return hub_->all_closed() || waited >= kForOthers;
  return hub_->all_joined() || hub_->missing().empty() || waited >= kForLatecomers;
}

bool ControlLoop::all_gone() const {
  return hub_ ? hub_->all_gone() : !link_->open() && (!relay_ || relay_->all_gone());
}

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
      if (relay_) {
        if (const auto world_end = state_->how_it_ended()) relay_->end(*world_end);
        relay_->leave();
        relay_->finish_sending();
      }
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
