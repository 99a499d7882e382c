#include "hsdp/comm/host/host_group.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "hsdp/comm/host/ring_layout.h"
#include "hsdp/comm/host/tcp_channel.h"
#include "hsdp/comm/host/tcp_links.h"
#include "hsdp/comm/host/tile_plan.h"
#include "hsdp/comm/long_wait.h"
#include "hsdp/comm/retry.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

// The index of `peer` among the other ranks, as counted by `owner`.
int ring_index(std::size_t owner, std::size_t peer) {
  return static_cast<int>(peer < owner ? peer : peer - 1);
}

}  // namespace

bool HostWorld::shares_memory_with(int peer) const {
  return peer == control->rank() ||
         (transport != TransportChoice::kTcp && control->shares_memory_with(peer));
}

HostGroup::HostGroup(std::shared_ptr<HostWorld> world, std::string id, std::vector<int> members)
    : world_(std::move(world)),
      id_(std::move(id)),
      members_(std::move(members)),
      ascending_(members_),
      rank_(index_of(world_->control->rank())),
      lines_(members_.size()),
      channels_(members_.size()),
      calls_(members_.size()),
      seen_dropped_(members_.size()) {
  std::ranges::sort(ascending_);
  std::ranges::copy_if(ascending_, std::back_inserter(neighbours_),
                       [&](int peer) { return world_->shares_memory_with(peer); });
  lines_[static_cast<std::size_t>(rank_)] = &own_lines_;
  if (size() == 1) return;
  if (neighbours_.size() > 1) open_lines();
  Bell& bell = lines_[static_cast<std::size_t>(rank_)]->bell;
  if (shares_memory()) {
    board_ = std::make_unique<HostBoard>(*group_lines_, lines_, members_, rank_, control());
    waiter_ = std::make_unique<Waiter>(bell);
  } else {
    planned_calls_.emplace(world_->control, id_, members_, "host");
    if (neighbours_.size() > 1) open_rings();
    auto sockets = std::make_unique<SocketWaiter>(bell, neighbours_.size() > 1);
    sockets_ = sockets.get();
    waiter_ = std::move(sockets);
  }
  wake_ = control().on_failure([&bell, board = board_.get()] {
    bell.ring();
    if (board != nullptr) board->bell().ring();
  });
}

// One length for all pairs: at most a ring's slot if any pair has a ring.
std::size_t HostGroup::agree_message_bytes() {
  const std::size_t slot = RingLayout(size()).message_bytes();
  if (shares_memory()) return slot;
  const auto counts = exchange("neighbours", std::to_string(neighbours_.size()));
  const bool rings = std::ranges::any_of(counts, [](const auto& count) { return count != "1"; });
  return rings ? std::min(slot, tcp_message_bytes(size())) : tcp_message_bytes(size());
}

Transport HostGroup::transport() const {
  if (size() == 1) return Transport::kNone;
  if (shares_memory()) {
    return control().in_process() ? Transport::kInProcess : Transport::kSharedMemory;
  }
  return neighbours_.size() == 1 ? Transport::kTcp : Transport::kMixed;
}

int HostGroup::index_of(int world_rank) const {
  return static_cast<int>(std::ranges::find(members_, world_rank) - members_.begin());
}

std::vector<std::shared_ptr<SharedSegment>> HostGroup::share_segment(std::size_t size,
                                                                     const std::string& what) {
  std::shared_ptr<SharedSegment> mine;
  std::string reason;
  try {
    // Half of the timeout: peers wait for this rank and should learn why it failed.
    const auto end = std::chrono::steady_clock::now() + control().timeout() / 2;
    mine = wait_out_limit(end, [&] {
      control().throw_if_failed();
      return SharedSegment::create(size, what);
    });
    mine->hide_from_children();
  } catch (const Error& error) {
    reason = error.what();
  }
  auto segments = exchange_segments(control(), id_ + "/" + what, neighbours_, mine, reason);
  segments_.insert(segments_.end(), segments.begin(), segments.end());
  return segments;
}

void HostGroup::open_lines() {
  const auto segments = share_segment(sizeof(RankLines) + sizeof(GroupLines), "board");
  for (std::size_t i = 0; i < neighbours_.size(); ++i) {
    const auto rank = static_cast<std::size_t>(index_of(neighbours_[i]));
    lines_[rank] = reinterpret_cast<RankLines*>(segments[i]->data());
    if (rank == 0) group_lines_ = reinterpret_cast<GroupLines*>(lines_[rank] + 1);
  }
}

void HostGroup::open_rings() {
  const RingLayout layout(size());
  const auto segments = share_segment(layout.segment_bytes(), "rings");
  const auto own = static_cast<std::size_t>(std::ranges::find(neighbours_, control().rank()) -
                                            neighbours_.begin());
  std::vector<MulticastRing> to_all(members_.size());
  std::vector<Bell*> bells(members_.size());
  for (std::size_t peer = 0; peer < neighbours_.size(); ++peer) {
    const auto rank = static_cast<std::size_t>(index_of(neighbours_[peer]));
    to_all[rank] = layout.multicast(segments[peer]->data());
    bells[rank] = &lines_[rank]->bell;
    if (peer == own) continue;
    channels_[rank] =
        std::make_unique<RingChannel>(layout.ring(segments[own]->data(), ring_index(own, peer)),
                                      layout.ring(segments[peer]->data(), ring_index(peer, own)),
                                      layout.message_bytes(), *bells[rank]);
  }
  if (!shares_memory()) return;
  multicast_ = std::make_unique<Multicast>(std::move(to_all), std::move(bells), rank_,
                                           layout.message_bytes());
}

void HostGroup::open_sockets() {
  // Names this attempt: a group whose links could not be made may try again.
  const std::string key = id_ + "/" + std::to_string(sequence_) + "/tcp";
  auto sockets = connect_tcp({control(), key, members_, neighbours_});
  for (std::size_t r = 0; r < sockets.size(); ++r) {
    if (!sockets[r]) continue;
    auto channel = std::make_unique<TcpChannel>(std::move(sockets[r]), message_bytes_,
                                                TcpPeer{control(), members_[r], waiting_});
    sockets_->add(*channel);
    channels_[r] = std::move(channel);
  }
}

void HostGroup::open_scratch() {
  if (!scratch_.empty()) return;
  tile_bytes_ = TilePlan::tile_bytes(size());
  const auto segments = share_segment(2 * tile_bytes_, "scratch");
  scratch_.resize(members_.size());
  for (std::size_t i = 0; i < neighbours_.size(); ++i) {
    scratch_[static_cast<std::size_t>(index_of(neighbours_[i]))] = segments[i]->data();
  }
}

void HostGroup::open_channels() {
  if (open_ || size() == 1) return;
  message_bytes_ = agree_message_bytes();
  if (shares_memory()) {
    open_rings();
  } else {
    open_sockets();
  }
  open_ = true;
}

void HostGroup::wait(const std::function<bool()>& ready, const std::function<int()>& peer) {
  const auto look = [&] {
    if (sockets_ != nullptr) sockets_->look();
    return ready();
  };
  LongWait wait;
  const auto world_rank = [&] {  // called before a sleep
    if (planned_calls_ && wait.has_become_long()) planned_calls_->tell_of_wait();
    return members_[static_cast<std::size_t>(peer())];
  };
  wait_until(control(), *waiter_, waiting_, look, world_rank);
}

std::span<const HostCall> HostGroup::agree(HostCall mine, std::span<const std::byte> bytes,
                                           std::string_view act) {
  waiting_ = wait_in(mine, act);
  throw_if_failed(control(), waiting_);
  ++sequence_;
  if (size() == 1) {
    calls_[0] = mine;
    return calls_;
  }
  HostCall planned = mine;
  planned.wants_nonfinite = 0;  // each rank decides for itself
  if (planned_calls_ && planned_calls_->begin(planned) && open_) {
    std::ranges::fill(calls_, mine);
    return calls_;
  }
  mine.dropped = memory().dropped();
  const auto calls = board_  ? board_->post(mine, waiting_)
                     : open_ ? post_by_channels(mine)
                             : post_by_control(mine, bytes);
  for (std::size_t r = 0; r < calls.size(); ++r) {
    if (!is_call(calls[r])) planned_calls_->end_by_data(members_[r], waiting_);
    if (!agrees(calls[r], mine)) end_world(control(), mismatch(calls, members_), waiting_);
    if (seen_dropped_[r] == calls[r].dropped) continue;
    seen_dropped_[r] = calls[r].dropped;
    memory().forget_dropped();
  }
  if (planned_calls_) planned_calls_->agreed(planned);
  return calls;
}

std::span<const HostCall> HostGroup::post_by_channels(const HostCall& mine) {
  const auto* const message = reinterpret_cast<const std::byte*>(&mine);
  std::vector<bool> sent(members_.size());
  std::vector<bool> received(members_.size());
  int missing = 0;
  wait(
      [&] {
        bool complete = true;
        for (int r = 0; r < size(); ++r) {
          if (r == rank_) continue;
          const auto i = static_cast<std::size_t>(r);
          if (!sent[i]) sent[i] = channel(r).send(message, sizeof(HostCall));
          if (!received[i]) {
            received[i] =
                channel(r).receive(reinterpret_cast<std::byte*>(&calls_[i]), sizeof(HostCall));
          }
          if (sent[i] && received[i]) continue;
          missing = r;
          complete = false;
        }
        return complete;
      },
      [&] { return missing; });
  calls_[static_cast<std::size_t>(rank_)] = mine;
  return calls_;
}

std::span<const HostCall> HostGroup::post_by_control(const HostCall& mine,
                                                     std::span<const std::byte> bytes) {
  std::string message(reinterpret_cast<const char*>(&mine), sizeof mine);
  message.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  messages_ = exchange("call", message);
  for (std::size_t r = 0; r < messages_.size(); ++r) {
    if (messages_[r].size() < sizeof(HostCall)) {
      throw Error("host: a call: expected " + std::to_string(sizeof(HostCall)) + " bytes, got " +
                  std::to_string(messages_[r].size()) + " (rank " + std::to_string(members_[r]) +
                  " of " + std::to_string(control().size()) + ")");
    }
    std::memcpy(&calls_[r], messages_[r].data(), sizeof(HostCall));
  }
  return calls_;
}

std::span<const std::byte> HostGroup::bytes_of(int rank) const {
  return std::as_bytes(std::span(messages_[static_cast<std::size_t>(rank)]))
      .subspan(sizeof(HostCall));
}

std::vector<std::string> HostGroup::exchange(const std::string& what, const std::string& message) {
  if (size() == 1) return {message};
  const auto key = id_ + "/" + std::to_string(sequence_) + "/" + what;
  auto ordered = control().exchange(key, ascending_, message, waiting_);
  std::vector<std::string> messages(ordered.size());
  for (std::size_t i = 0; i < ordered.size(); ++i) {
    messages[static_cast<std::size_t>(index_of(ascending_[i]))] = std::move(ordered[i]);
  }
  return messages;
}

}  // namespace hsdp::comm
