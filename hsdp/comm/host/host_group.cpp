#include "hsdp/comm/host/host_group.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "hsdp/comm/host/ring_layout.h"
#include "hsdp/comm/host/tcp_channel.h"
#include "hsdp/comm/host/tcp_links.h"
#include "hsdp/comm/host/tile_plan.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

constexpr std::size_t kTcpMessageBytes = std::size_t{256} << 10;

// Sleeps until a socket moves. Rings have no descriptor: with both in one group, sleep briefly.
class SocketBed : public Bed {
 public:
  SocketBed(Bell& bell, const std::vector<std::unique_ptr<Channel>>& channels, bool rings_too)
      : Bed(bell), channels_(channels), rings_too_(rings_too) {}

  void sleep(std::uint32_t /*seen*/, std::chrono::milliseconds at_most) override {
    sockets_.clear();
    for (const auto& channel : channels_) {
      if (channel == nullptr || channel->blocked_events() == 0) continue;
      sockets_.push_back({channel->socket(), channel->blocked_events(), 0});
    }
    constexpr std::chrono::milliseconds kWithRings{2};
    const auto limit = rings_too_ ? std::min(at_most, kWithRings) : at_most;
    ::poll(sockets_.data(), sockets_.size(), static_cast<int>(limit.count()));
  }

 private:
  const std::vector<std::unique_ptr<Channel>>& channels_;
  std::vector<pollfd> sockets_;
  bool rings_too_;
};

// The place of `peer` among the others, seen by `owner`.
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
  message_bytes_ = agree_message_bytes();
  if (neighbours_.size() > 1) open_lines();
  Bell& bell = lines_[static_cast<std::size_t>(rank_)]->bell;
  if (shares_memory()) {
    board_ = std::make_unique<HostBoard>(lines_, members_, rank_, control());
    bed_ = std::make_unique<Bed>(bell);
  } else {
    if (neighbours_.size() > 1) open_rings();
    open_sockets();
    bed_ = std::make_unique<SocketBed>(bell, channels_, neighbours_.size() > 1);
  }
  wake_ = control().on_failure([&bell] { bell.ring(); });
}

// One length for all pairs: that of a ring's slot if any pair has a ring.
std::size_t HostGroup::agree_message_bytes() {
  const std::size_t slot = RingLayout(size()).message_bytes();
  if (shares_memory()) return slot;
  const auto counts = exchange("neighbours", std::to_string(neighbours_.size()));
  return std::ranges::all_of(counts, [](const auto& count) { return count == "1"; })
             ? kTcpMessageBytes
             : slot;
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
    mine = SharedSegment::create(size, what);
    mine->hide_from_children();
  } catch (const Error& error) {
    reason = error.what();
  }
  auto segments = exchange_segments(control(), id_ + "/" + what, neighbours_, mine, reason);
  segments_.insert(segments_.end(), segments.begin(), segments.end());
  return segments;
}

void HostGroup::open_lines() {
  const auto segments = share_segment(sizeof(RankLines), "board");
  for (std::size_t i = 0; i < neighbours_.size(); ++i) {
    lines_[static_cast<std::size_t>(index_of(neighbours_[i]))] =
        reinterpret_cast<RankLines*>(segments[i]->data());
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
  auto sockets = connect_tcp({control(), id_, members_, neighbours_});
  for (std::size_t r = 0; r < sockets.size(); ++r) {
    if (!sockets[r]) continue;
    channels_[r] = std::make_unique<TcpChannel>(std::move(sockets[r]), message_bytes_,
                                                TcpPeer{control(), members_[r], waiting_});
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
  if (shares_memory() && channels_[rank_ == 0 ? 1 : 0] == nullptr) open_rings();
}

void HostGroup::wait(const std::function<bool()>& ready, const std::function<int()>& peer) {
  wait_until(control(), *bed_, waiting_, ready,
             [&] { return members_[static_cast<std::size_t>(peer())]; });
}

std::span<const HostCall> HostGroup::agree(HostCall mine) {
  waiting_ = {.operation = name(mine.operation), .bucket = mine.bucket};
  throw_if_failed(control(), waiting_);
  ++sequence_;
  mine.dropped = memory().dropped();
  if (size() == 1) {
    calls_[0] = mine;
    return calls_;
  }
  const auto calls = board_ ? board_->post(sequence_, mine, waiting_) : post_by_channels(mine);
  for (std::size_t r = 0; r < calls.size(); ++r) {
    if (!agrees(calls[r], mine)) end_world(control(), mismatch(calls, members_), waiting_);
    if (seen_dropped_[r] == calls[r].dropped) continue;
    seen_dropped_[r] = calls[r].dropped;
    memory().forget_dropped();
  }
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
