#include "hsdp/comm/control/control_member.h"

#include <algorithm>
#include <utility>

#include "hsdp/comm/control/world_end.h"

namespace hsdp::comm {
namespace {

// How much later than rank 0 a rank judges by itself, in case rank 0 cannot.
constexpr std::chrono::milliseconds kAfterHub{2'000};
// A wait for a rank that said goodbye may be about to end.
constexpr std::chrono::milliseconds kPatienceWithClosed{1'000};

}  // namespace

ControlMember::ControlMember(std::shared_ptr<ControlState> state, int rank, int size,
                             Millis timeout, Handlers handlers)
    : state_(std::move(state)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      handlers_(std::move(handlers)),
      parent_heard_(state_->clock().now()) {}

void ControlMember::set_parent(int rank) {
  parent_ = rank;
  heard();
}

void ControlMember::frame(FrameType type, std::string_view body) {
  heard();
  switch (type) {
    case FrameType::kBeat:
      if (auto beat = BeatFrame::decode(body)) missing_ = std::move(beat->missing);
      return;
    case FrameType::kAnswer:
      if (auto answer = AnswerFrame::decode(body)) {
        state_->deliver(answer->exchange, std::move(answer->agreement));
      }
      return;
    case FrameType::kTell:
      if (auto told = TellFrame::decode(body)) {
        state_->hear(told->topic, told->peer, told->message);
      }
      return;
    case FrameType::kWelcome:
      welcomed_ = true;
      if (auto welcome = WelcomeFrame::decode(body);
          welcome && std::ssize(welcome->hosts) == size_) {
        state_->welcome(std::move(*welcome));
      }
      return;
    case FrameType::kFail:
      if (auto world_end = WorldEnd::decode(body)) end(*world_end);
      return;
    case FrameType::kRefuse:
      return end({.failure = {FailureKind::kMismatch, std::string(body), {rank_}}});
    case FrameType::kGoodbye:
      who_left_ = rank_in(body).value_or(parent_);
      left_at_ = state_->clock().now();
      return state_->hub_left();
    default:
      return end(
          {.failure = {FailureKind::kMismatch, "control: unexpected message from rank 0", {0}}});
  }
}

void ControlMember::end(const WorldEnd& world_end) {
  if (state_->end(world_end)) handlers_.on_end();
}

void ControlMember::fail(const WorldEnd& world_end) {
  state_->end(world_end);
  handlers_.to_hub(FrameType::kFail, world_end.encode());
  handlers_.on_end();
}

void ControlMember::parent_closed(const std::string& reason) {
  if (who_left_) return;
  const WorldEnd world_end = end_by_loss(parent_, size_, reason);
  handlers_.on_cut_off(world_end);
  end(world_end);
}

BeatFrame ControlMember::beat() const {
  BeatFrame beat;
  for (const ActiveWait& wait : state_->active_waits()) {
    beat.waits.push_back(
        {wait.id, wait.operation, wait.bucket, wait.peer, wait.exchange, wait.age});
  }
  return beat;
}

void ControlMember::tick() {
  if (state_->failed()) return;
  const Millis silent = state_->clock().now() - parent_heard_;
  if (!who_left_ && silent >= timeout_) {
    WorldEnd world_end;
    world_end.failure = {FailureKind::kTimeout,
                         ranks_text({parent_}, size_) +
                             " is stopped or unreachable: no sign of life for " +
                             seconds_text(silent),
                         {parent_}};
    world_end.bare = true;
    handlers_.on_cut_off(world_end);
    return fail(world_end);
  }
  const Millis since_left = state_->clock().now() - left_at_;
  for (const ActiveWait& wait : state_->active_waits()) {
    // Without rank 0, exchanges are never answered.
    const bool in_vain =
        who_left_ &&
        (wait.exchange != 0 ||
         (wait.peer == *who_left_ && std::min(wait.age, since_left) >= kPatienceWithClosed));
    if (in_vain) return fail(end_by_loss(*who_left_, size_, "it closed its world"));
    if (wait.age < timeout_ + kAfterHub) continue;
    WorldEnd world_end;
    world_end.failure.kind = FailureKind::kTimeout;
    world_end.bare = true;
    if (!welcomed_) world_end.failure.ranks = missing_;
    if (wait.peer >= 0) world_end.failure.ranks = {wait.peer};
    world_end.failure.message =
        (world_end.failure.ranks.empty()
             ? "no answer"
             : ranks_text(world_end.failure.ranks, size_) + " did not arrive") +
        " within " + seconds_text(wait.age);
    return fail(world_end);
  }
}

}  // namespace hsdp::comm
