// One rank's side of the control connection: takes what comes from rank 0, and judges by itself
// where rank 0 cannot. Rank 0 has one, too.
//
// It does no I/O and has no thread: who owns it brings what came and the time, one call at a time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/control/control_frames.h"
#include "hsdp/comm/control/control_state.h"

namespace hsdp::comm {

class ControlMember {
 public:
  struct Handlers {
    std::function<void(FrameType type, const std::string& body)> to_hub;
    // The world has ended here: run_callbacks() is due.
    std::function<void()> on_end;
  };

  ControlMember(std::shared_ptr<ControlState> state, int rank, int size,
                std::chrono::milliseconds timeout, Handlers handlers);

  void frame(FrameType type, std::string_view body);
  void heard() { hub_heard_ = state_->clock().now(); }  // a sign of life of rank 0
  void hub_closed(const std::string& reason);
  // Watches over rank 0, until the world ends.
  void tick();
  [[nodiscard]] BeatFrame beat() const;
  // Ends the world on every rank.
  void fail(const WorldEnd& world_end);
  // On this rank alone.
  void end(const WorldEnd& world_end);
  [[nodiscard]] bool hub_left() const { return hub_left_; }

 private:
  using Millis = std::chrono::milliseconds;

  std::shared_ptr<ControlState> state_;
  int rank_;
  int size_;
  Millis timeout_;
  Handlers handlers_;
  Millis hub_heard_;
  bool hub_left_ = false;
  Millis hub_left_at_{0};
  std::vector<int> missing_;  // as rank 0 last told
  bool welcomed_ = false;
};

}  // namespace hsdp::comm
