#include "communicators.h"

#include <nccl.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "trace.h"

namespace hsdp::nccl_shim {
namespace {

bool is_set(const char* variable) {
  const char* const text = std::getenv(variable);
  return text != nullptr && std::string_view(text) == "1";
}

}  // namespace

std::string Seat::text() const {
  return "communicator " + communicator + " of rank " + std::to_string(world_rank);
}

Communicators& communicators() {
  static auto* const one = new Communicators;  // never destroyed: threads may use it during exit
  return *one;
}

Communicators::Member* Communicators::find(Handle comm) {
  const auto place = members_.find(comm);
  return place == members_.end() ? nullptr : &place->second;
}

void Communicators::add(Handle comm, const Seat& seat, int result) {
  const std::lock_guard lock(mutex_);
  ended_.erase(comm);
  members_[comm] = {.seat = seat,
                    .phase = result == ncclInProgress ? Phase::kInProgress : Phase::kIdle};
}

Communicators::Member* Communicators::require(Handle comm, const std::string& call) {
  if (Member* const member = find(comm)) return member;
  const auto ended = ended_.find(comm);
  const std::string which = ended == ended_.end()
                                ? "a communicator that this process does not hold"
                                : ended->second.seat.text() + ", which was destroyed or aborted";
  report_violation("use_after_end", call + " on " + which);
  return nullptr;
}

std::optional<Seat> Communicators::enter(Handle comm, const std::string& call, CallKind kind) {
  const std::lock_guard lock(mutex_);
  Member* const member = require(comm, call);
  if (member == nullptr) return std::nullopt;
  if (kind != CallKind::kEnd && member->phase != Phase::kIdle) {
    report_violation("in_progress", call + " on " + member->seat.text() +
                                        " before ncclCommGetAsyncError said that the call before "
                                        "had succeeded");
  }
  if (kind == CallKind::kEnqueue && !member->failure.empty()) {
    report_violation("use_after_failure",
                     call + " on " + member->seat.text() + " after " + member->failure);
  }
  ++member->seat.sequence;
  return member->seat;
}

void Communicators::set_place(Handle comm, int rank, int size) {
  const std::lock_guard lock(mutex_);
  Member* const member = find(comm);
  if (member == nullptr) return;
  member->seat.rank = rank;
  member->seat.size = size;
}

void Communicators::begin_work(Handle comm) {
  const std::lock_guard lock(mutex_);
  if (Member* const member = find(comm)) {
    member->phase = Phase::kCalling;
    ++member->works;
  }
}

// A launch counts as under way on each communicator of the group until that is seen settled.
void Communicators::begin_launch(std::span<const Handle> comms) {
  const std::lock_guard lock(mutex_);
  ++launches_;
  for (Handle const comm : comms) {
    Member* const member = find(comm);
    if (member == nullptr) continue;
    for (const auto& [_, other] : members_) {
      const bool under_way = other.launch != 0 && other.launch != launches_;
      if (under_way && &other != member && other.seat.device == member->seat.device) {
        report_race(other, *member);
      }
    }
    member->launch = launches_;
    member->phase = Phase::kCalling;
    ++member->works;
  }
}

void Communicators::report_race(const Member& first, const Member& second) const {
  constexpr const char* kVariable = "NCCL_LAUNCH_ORDER_IMPLICIT";
  const std::string text = "a launch on " + second.seat.text() + " while one on " +
                           first.seat.text() + " is under way, both on device " +
                           std::to_string(second.seat.device);
  if (is_set(kVariable)) {
    report_violation("launch_race", text + "; " + kVariable + "=1 forbids that");
  } else {
    report_note("launch_race", text);
  }
}

void Communicators::end_work(std::span<const Handle> comms, const std::string& call, int result) {
  const std::lock_guard lock(mutex_);
  for (Handle const comm : comms) {
    Member* const member = find(comm);
    if (member == nullptr) continue;
    if (result == ncclInProgress) {
      member->phase = Phase::kInProgress;
    } else if (result == ncclSuccess) {
      settle(*member);
    } else {
      if (member->phase == Phase::kCalling) member->phase = Phase::kIdle;  // not an earlier call's
      member->launch = 0;
      member->child_place = nullptr;
      member->failure = call + " returned error " + std::to_string(result);
    }
  }
}

void Communicators::await_child(Handle parent, int color, Handle* child) {
  const std::lock_guard lock(mutex_);
  Member* const member = find(parent);
  if (member == nullptr) return;
  ++member->splits;
  member->child = {.communicator = member->seat.communicator + "/" +
                                   std::to_string(member->splits) + "c" + std::to_string(color),
                   .world_rank = member->seat.world_rank,
                   .device = member->seat.device};
  member->child_place = color < 0 ? nullptr : child;
}

// By now NCCL has written the child's handle.
void Communicators::settle(Member& member) {
  member.phase = Phase::kIdle;
  member.launch = 0;
  Handle* const place = std::exchange(member.child_place, nullptr);
  if (place == nullptr || *place == nullptr) return;
  ended_.erase(*place);
  members_[*place] = {.seat = member.child};
}

std::int64_t Communicators::begin_look(Handle comm) {
  const std::lock_guard lock(mutex_);
  const Member* const member = require(comm, "ncclCommGetAsyncError");
  return member == nullptr || member->phase == Phase::kCalling ? 0 : member->works;
}

void Communicators::end_look(Handle comm, std::int64_t look, int result) {
  const std::lock_guard lock(mutex_);
  Member* const member = find(comm);
  if (member == nullptr || result == ncclInProgress) return;
  if (result != ncclSuccess) {
    member->phase = Phase::kIdle;  // the work has failed
    member->launch = 0;
    member->child_place = nullptr;
    member->failure = "ncclCommGetAsyncError gave error " + std::to_string(result);
  } else if (member->works == look && member->phase == Phase::kInProgress) {
    settle(*member);
  }
}

void Communicators::end(Handle comm) {
  const std::lock_guard lock(mutex_);
  auto member = members_.extract(comm);
  if (!member.empty()) ended_[comm] = std::move(member.mapped());
}

void Communicators::keep(Handle comm) {
  const std::lock_guard lock(mutex_);
  auto member = ended_.extract(comm);
  if (!member.empty()) members_[comm] = std::move(member.mapped());
}

void Communicators::revoke(Handle comm) {
  const std::lock_guard lock(mutex_);
  if (Member* const member = find(comm)) member->failure = "ncclCommRevoke";
}

void Communicators::enroll(Handle comm, const void* enrolled, const void* memory,
                           std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  Member* const member = find(comm);
  if (member == nullptr || enrolled == nullptr) return;
  const auto* const begin = static_cast<const char*>(memory);
  member->registered.emplace(enrolled, Range{begin, begin + bytes});
}

void Communicators::withdraw(Handle comm, const void* enrolled) {
  const std::lock_guard lock(mutex_);
  Member* const member = find(comm);
  if (member == nullptr) return;
  const auto place = member->registered.find(enrolled);
  if (place != member->registered.end()) member->registered.erase(place);
}

std::optional<bool> Communicators::is_registered(Handle comm, const void* memory,
                                                 std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto member = members_.find(comm);
  if (member == members_.end() || bytes == 0) return std::nullopt;
  const auto* const begin = static_cast<const char*>(memory);
  return std::ranges::any_of(member->second.registered, [&](const auto& entry) {
    return entry.second.begin <= begin && begin + bytes <= entry.second.end;
  });
}

void Communicators::report_living() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [_, member] : members_) {
    report_note("never_ended", member.seat.text() + " was neither destroyed nor aborted");
  }
}

}  // namespace hsdp::nccl_shim
