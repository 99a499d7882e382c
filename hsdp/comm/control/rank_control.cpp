#include "hsdp/comm/control/rank_control.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "hsdp/error.h"

namespace hsdp::comm {

void RankControl::require_usable() const {
  if (is_usable()) return;
  throw UsageError({.where = "control",
                    .expected = "use in the process that connected",
                    .got = "use in a forked child (rank " + std::to_string(rank_) + " of " +
                           std::to_string(size_) + ")",
                    .remedy = "use the world in its parent only"});
}

void RankControl::require_member(std::span<const int> members) const {
  const bool ascending =
      std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end();
  if (members.empty() || !ascending || members.front() < 0 || members.back() >= size_ ||
      !std::binary_search(members.begin(), members.end(), rank_)) {
    throw UsageError("control: members: expected ascending world ranks that hold this one (rank " +
                     std::to_string(rank_) + " of " + std::to_string(size_) + ")");
  }
}

void RankControl::post(std::string_view key, std::span<const int> members, const Saying& mine) {
  require_usable();
  require_member(members);
  send_post(members, {.key = std::string(key), .saying = mine});
}

void RankControl::send_post(std::span<const int> members, PostFrame frame) {
  frame.group = group_id(members);
  std::string body = frame.encode();
  // An answer, which holds some or all of the messages, must fit into one frame.
  constexpr std::size_t kOverheadBytes = 64U << 10U;
  const std::size_t kept = frame.saying.keeps_all ? members.size() : Agreement::kMostTexts;
  const std::size_t limit = (kMaxFrameBytes - kOverheadBytes) / std::min(members.size(), kept);
  if (body.size() > limit) {
    throw UsageError("control: message of an exchange among " + std::to_string(members.size()) +
                     " ranks: expected at most " + std::to_string(limit) + " bytes, got " +
                     std::to_string(body.size()));
  }
  if (failed()) return;  // collect() throws, and knows what the caller was doing
  {
    const std::lock_guard lock(mutex_);
    if (!named_groups_.contains(frame.group)) {
      send(FrameType::kGroup, GroupFrame{{members.begin(), members.end()}}.encode());
      named_groups_.insert(frame.group);
    }
  }
  send(FrameType::kPost, std::move(body));
}

void RankControl::forget_groups() {
  const std::lock_guard lock(mutex_);
  named_groups_.clear();
}

std::optional<std::vector<std::string>> RankControl::exchange_while_open(std::string_view key,
                                                                         std::string_view message,
                                                                         WaitState waiting) {
  require_usable();
  std::vector<int> everyone(static_cast<std::size_t>(size_));
  std::iota(everyone.begin(), everyone.end(), 0);
  send_post(everyone, {.key = std::string(key),
                       .saying = message_to_all(std::string(message)),
                       .while_open = true});
  const auto all = state_->take_while_open(exchange_name(key, group_id(everyone)), waiting);
  return all ? std::optional(all->messages(everyone)) : std::nullopt;
}

Agreement RankControl::collect(std::string_view key, std::span<const int> members,
                               WaitState waiting) {
  require_usable();
  require_member(members);
  return state_->take(exchange_name(key, group_id(members)), waiting);
}

std::optional<Agreement> RankControl::collect_within(std::string_view key,
                                                     std::span<const int> members,
                                                     WaitState waiting,
                                                     std::chrono::milliseconds time) {
  require_usable();
  require_member(members);
  return state_->take_within(exchange_name(key, group_id(members)), waiting, time);
}

void RankControl::tell(int peer, std::string_view topic, std::string_view message) {
  require_usable();
  require_other_rank(peer, rank_, size_);
  TellFrame frame{peer, std::string(topic), std::string(message)};
  std::string body = frame.encode();
  constexpr std::size_t kMost = kMaxFrameBytes - 64;  // a relay adds the rank
  if (body.size() > kMost) {
    throw UsageError("control: tell: expected at most " + std::to_string(kMost) + " bytes, got " +
                     std::to_string(body.size()));
  }
  if (!failed()) send(FrameType::kTell, std::move(body));
}

std::shared_ptr<void> RankControl::listen(std::string_view topic, Hear hear) {
  require_usable();
  return state_->listen(topic, std::move(hear));
}

void RankControl::fail(const Failure& failure) {
  if (!is_usable()) return;
  WorldEnd world_end;
  world_end.failure = failure;
  end_world(world_end);
}

void RankControl::throw_if_failed() const {
  require_usable();
  state_->throw_if_failed();
}

void RankControl::throw_if_failed_in(std::string_view operation) const {
  require_usable();
  state_->throw_if_failed(WaitState{.operation = operation});
}

std::shared_ptr<void> RankControl::on_failure(std::function<void()> wake) {
  require_usable();
  auto handle = state_->on_failure(std::move(wake));
  if (state_->failed()) run_callbacks_soon();
  return handle;
}

}  // namespace hsdp::comm
