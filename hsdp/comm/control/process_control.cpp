#include "hsdp/comm/control/process_control.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "hsdp/comm/fork_guard.h"
#include "hsdp/comm/retry.h"
#include "hsdp/error.h"

namespace hsdp::comm {

ProcessControl::~ProcessControl() {
  if (!is_forked()) return;
  // Thread and descriptors are the parent's: nothing here can be joined, closed or freed.
  static_cast<void>(loop_.release());
  // NOLINTNEXTLINE(cppcoreguidelines-owning-memory): left alive on purpose
  static_cast<void>(new (std::nothrow) std::shared_ptr<ControlState>(state_));
}

bool ProcessControl::is_forked() const { return fork_generation() != generation_; }

void ProcessControl::require_own_process() const {
  if (!is_forked()) return;
  throw UsageError({.where = "control",
                    .expected = "use in the process that connected",
                    .got = "use in a forked child (rank " + std::to_string(rank_) + " of " +
                           std::to_string(size_) + ")",
                    .remedy = "use the world in its parent only"});
}

void ProcessControl::require_member(std::span<const int> members) const {
  const bool ascending =
      std::adjacent_find(members.begin(), members.end(), std::greater_equal<>()) == members.end();
  if (members.empty() || !ascending || members.front() < 0 || members.back() >= size_ ||
      !std::binary_search(members.begin(), members.end(), rank_)) {
    throw UsageError("control: members: expected ascending world ranks that hold this one (rank " +
                     std::to_string(rank_) + " of " + std::to_string(size_) + ")");
  }
}

bool ProcessControl::shares_memory_with(int peer) const {
  return peer >= 0 && peer < size_ && shares_[static_cast<std::size_t>(peer)];
}

void ProcessControl::post(std::string_view key, std::span<const int> members,
                          std::string_view message) {
  require_own_process();
  require_member(members);
  send_post({.key = std::string(key),
             .members = {members.begin(), members.end()},
             .message = std::string(message)});
}

void ProcessControl::send_post(const PostFrame& frame) {
  // An answer holds all messages and must fit into one frame.
  constexpr std::size_t kOverheadBytes = 64U << 10U;
  const std::size_t limit =
      (kMaxFrameBytes - kOverheadBytes) / frame.members.size() - 2 * frame.key.size();
  if (frame.message.size() > limit) {
    throw UsageError("control: message of an exchange among " +
                     std::to_string(frame.members.size()) + " ranks: expected at most " +
                     std::to_string(limit) + " bytes, got " + std::to_string(frame.message.size()));
  }
  if (failed()) return;  // collect() tells, and knows what the caller was doing
  loop_->send(FrameType::kPost, frame.encode());
}

std::optional<std::vector<std::string>> ProcessControl::exchange_while_open(
    std::string_view key, std::string_view message, WaitState waiting) {
  require_own_process();
  PostFrame frame{.key = std::string(key),
                  .members = std::vector<int>(static_cast<std::size_t>(size_)),
                  .message = std::string(message),
                  .while_open = true};
  std::iota(frame.members.begin(), frame.members.end(), 0);
  send_post(frame);
  return state_->take_while_open(exchange_name(key, frame.members), waiting);
}

std::vector<std::string> ProcessControl::collect(std::string_view key, std::span<const int> members,
                                                 WaitState waiting) {
  require_own_process();
  require_member(members);
  return state_->take(exchange_name(key, members), waiting);
}

std::optional<std::vector<std::string>> ProcessControl::collect_within(
    std::string_view key, std::span<const int> members, WaitState waiting,
    std::chrono::milliseconds time) {
  require_own_process();
  require_member(members);
  return state_->take_within(exchange_name(key, members), waiting, time);
}

void ProcessControl::tell(int peer, std::string_view topic, std::string_view message) {
  require_own_process();
  require_other_rank(peer, rank_, size_);
  TellFrame frame{peer, std::string(topic), std::string(message)};
  std::string body = frame.encode();
  if (body.size() > kMaxFrameBytes) {
    throw UsageError("control: tell: expected at most " + std::to_string(kMaxFrameBytes) +
                     " bytes, got " + std::to_string(body.size()));
  }
  if (!failed()) loop_->send(FrameType::kTell, std::move(body));
}

std::shared_ptr<void> ProcessControl::listen(std::string_view topic, Hear hear) {
  require_own_process();
  return state_->listen(topic, std::move(hear));
}

std::vector<UniqueFd> ProcessControl::exchange_descriptors(std::string_view key,
                                                           std::span<const int> members, int fd) {
  require_own_process();
  require_member(members);
  for (const int member : members) {
    if (shares_memory_with(member)) continue;
    throw UsageError("control: exchange of descriptors: rank " + std::to_string(member) +
                     " cannot be passed any (rank " + std::to_string(rank_) + ")");
  }
  const std::string exchange = exchange_name(key, members);
  if (exchange.size() > DescriptorChannel::kMaxTextBytes / 2) {
    throw UsageError("control: exchange of descriptors: key or group too large");
  }
  UniqueFd copy = wait_out_limit(std::chrono::steady_clock::now() + timeout_, [&] {
    throw_if_failed();
    UniqueFd own(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!own) throw_if_descriptor_limit("control: cannot pass descriptor " + std::to_string(fd));
    return own;
  });
  if (!copy) {
    throw Error("control: cannot pass descriptor " + std::to_string(fd) + ": " +
                std::strerror(errno));
  }
  if (members.size() == 1) {
    std::vector<UniqueFd> own(1);
    return own;
  }
  loop_->send_descriptor(exchange, std::move(copy));
  // The broker has no view of who is missing; rank 0 has, so the ranks also meet there.
  const WaitState waiting{"exchange_descriptors"};
  static_cast<void>(this->exchange(std::string(key) + " descriptors", members, "", waiting));
  return state_->take_descriptors(exchange, members, rank_, waiting);
}

int ProcessControl::begin_wait(WaitState state) { return state_->begin_wait(state); }

void ProcessControl::end_wait(int slot) { state_->end_wait(slot); }

void ProcessControl::fail(const Failure& failure) {
  if (is_forked()) return;
  WorldEnd world_end;
  world_end.failure = failure;
  loop_->fail(world_end);
}

bool ProcessControl::failed() const { return state_->failed() || is_forked(); }

void ProcessControl::throw_if_failed() const {
  require_own_process();
  state_->throw_if_failed();
}

void ProcessControl::throw_if_failed_in(std::string_view operation) const {
  require_own_process();
  state_->throw_if_failed(WaitState{.operation = operation});
}

std::shared_ptr<void> ProcessControl::on_failure(std::function<void()> wake) {
  require_own_process();
  auto handle = state_->on_failure(std::move(wake));
  if (state_->failed()) loop_->run_callbacks_soon();
  return handle;
}

}  // namespace hsdp::comm
