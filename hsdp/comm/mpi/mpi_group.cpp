#include "hsdp/comm/mpi/mpi_group.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "hsdp/comm/long_wait.h"
#include "hsdp/comm/mpi/mpi_library.h"
#include "hsdp/error.h"

namespace hsdp::comm {

int MpiWorld::reserve_tag() {
  const std::int64_t tag =
      std::int64_t{next_group.fetch_add(1)} * control->size() + control->rank();
  return link == nullptr || tag <= link->largest_tag() ? static_cast<int>(tag) : -1;
}

void PollingWaiter::sleep(std::uint32_t /*seen*/, std::chrono::milliseconds /*at_most*/) {
  // A sleep may lose a sixteenth of the time waited so far.
  constexpr std::chrono::microseconds kShortest{20};
  constexpr std::chrono::microseconds kLongest{2'000};
  const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::steady_clock::now() - start_);
  std::this_thread::sleep_for(std::clamp(waited / 16, kShortest, kLongest));
}

MpiGroup::MpiGroup(std::shared_ptr<MpiWorld> world, Place place)
    : world_(std::move(world)),
      place_(std::move(place)),
      ascending_(place_.members),
      rank_(index_of(world_->control->rank())) {
  std::ranges::sort(ascending_);
  if (size() > 1) {
    planned_calls_.emplace(world_->control, place_.id, place_.members, "mpi");
  }
}

int MpiGroup::index_of(int world_rank) const {
  return static_cast<int>(std::ranges::find(place_.members, world_rank) - place_.members.begin());
}

void MpiGroup::agree(const HostCall& mine, std::string_view act) {
  waiting_ = wait_in(mine, act);
  throw_if_failed(control(), waiting_);
  ++sequence_;
  if (size() == 1 || planned_calls_->begin(mine)) return;
  constexpr HostCall kNoCall{.kind = CallKind{}};  // until a whole call has arrived
  auto calls = std::make_shared<std::vector<HostCall>>(place_.members.size(), kNoCall);
  (*calls)[static_cast<std::size_t>(rank_)] = mine;
  auto sent = std::make_shared<HostCall>(mine);
  MpiTransfers messages = transfers();
  messages.keep(calls);
  messages.keep(sent);
  for (int distance = 1; distance < size(); ++distance) {
    const int r = (rank_ + distance) % size();
    messages.receive(peer(r), &(*calls)[static_cast<std::size_t>(r)], sizeof(HostCall));
    messages.send(peer(r), sent.get(), sizeof(HostCall));
  }
  wait(messages);
  const auto data = std::ranges::find_if_not(*calls, is_call);
  if (data != calls->end()) {
    planned_calls_->end_by_data(peer(static_cast<int>(data - calls->begin())), waiting_);
  }
  if (!std::ranges::all_of(*calls, [&](const auto& call) { return agrees(call, mine); })) {
    end_world(control(), mismatch(*calls, place_.members, "mpi"), waiting_);
  }
  planned_calls_->agreed(mine);
}

std::shared_ptr<std::byte[]> MpiGroup::scratch(std::size_t which, std::size_t size) {
  if (scratch_.size() <= which) scratch_.resize(which + 1);
  Scratch& buffer = scratch_[which];
  if (buffer.size < size) {
    buffer = {};  // freed before the larger one is made
    buffer = {std::make_shared_for_overwrite<std::byte[]>(size), size};
  }
  return buffer.bytes;
}

void MpiGroup::wait(MpiTransfers& transfers) {
  try {
    waiter_.start_wait();
    LongWait wait;
    const auto peer = [&] {  // called before a sleep
      if (wait.has_become_long()) planned_calls_->tell_of_wait();
      return transfers.pending_peer();
    };
    wait_until(
        control(), waiter_, waiting_, [&] { return transfers.test(); }, peer);
  } catch (const RankError&) {
    throw;
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    throw_transfer_failed(error);
  }
}

// A peer that died or made a different call breaks the transfer; Control names it shortly after.
void MpiGroup::throw_transfer_failed(const std::exception& error) {
  planned_calls_->tell_of_wait();
  wait_for_verdict(control(), std::chrono::seconds(3));  // longer than others wait before they tell
  end_world(control(),
            {.kind = FailureKind::kAborted, .message = error.what(), .ranks = {control().rank()}},
            waiting_);
}

void MpiGroup::abandon() {
  if (world_->link == nullptr) return;
  world_->link->abandon();
  worsen_mpi_exit(MpiExit::kBounded);
}

std::vector<std::string> MpiGroup::exchange(const std::string& what, const std::string& message) {
  if (size() == 1) return {message};
  const auto key = place_.id + "/" + std::to_string(sequence_) + "/" + what;
  auto ordered = control().exchange(key, ascending_, message, waiting_);
  std::vector<std::string> messages(ordered.size());
  for (std::size_t i = 0; i < ordered.size(); ++i) {
    messages[static_cast<std::size_t>(index_of(ascending_[i]))] = std::move(ordered[i]);
  }
  return messages;
}

}  // namespace hsdp::comm
