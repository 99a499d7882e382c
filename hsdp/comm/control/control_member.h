// One rank's side of the control connection: handles what comes from rank 0, and judges by itself
// when rank 0 cannot. Rank 0 has one, too. Its parent is rank 0, or the rank through which it
// speaks to rank 0.
//
// It does no I/O and has no thread: the owner passes in messages and the time, one call at a time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
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
    // The world has ended here: call run_callbacks().
    std::function<void()> on_end;
    // Nothing comes from rank 0 any more. Called before on_end.
    std::function<void(const WorldEnd& world_end)> on_cut_off = [](const WorldEnd& /*end*/) {};
  };

  ControlMember(std::shared_ptr<ControlState> state, int rank, int size,
                std::chrono::milliseconds timeout, Handlers handlers);

  void frame(FrameType type, std::string_view body);
  void heard() { parent_heard_ = state_->clock().now(); }  // a sign of life from the parent
  void set_parent(int rank);
  [[nodiscard]] int parent() const { return parent_; }
  void parent_closed(const std::string& reason);
  // Checks the parent and this rank's waits, until the world ends.
  void tick();
  [[nodiscard]] BeatFrame beat() const;
  // Ends the world on every rank.
  void fail(const WorldEnd& world_end);
  // Ends it on this rank alone.
  void end(const WorldEnd& world_end);
  [[nodiscard]] bool is_left() const { return who_left_.has_value(); }

 private:
  using Millis = std::chrono::milliseconds;

  std::shared_ptr<ControlState> state_;
  int rank_;
  int size_;
  Millis timeout_;
  Handlers handlers_;
  int parent_ = 0;
  Millis parent_heard_;
  std::optional<int> who_left_;  // rank 0 or a rank between: rank 0 can no longer be reached
  Millis left_at_{0};
  std::vector<int> missing_;  // as last reported by rank 0
  bool welcomed_ = false;
};

}  // namespace hsdp::comm
