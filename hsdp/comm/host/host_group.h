// One rank's end of a group on the host engine: its members, their links, and the agreement before
// every collective.
//
// Constructing it is collective over the members. One thread at a time may use it. It owns memory
// and sockets; memory allocated through it may live longer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/host/channel.h"
#include "hsdp/comm/host/host_board.h"
#include "hsdp/comm/host/host_call.h"
#include "hsdp/comm/host/host_memory.h"
#include "hsdp/comm/host/multicast.h"
#include "hsdp/comm/host/shared_segment.h"
#include "hsdp/comm/host/socket_waiter.h"
#include "hsdp/comm/planned_calls.h"
#include "hsdp/comm/world.h"

namespace hsdp::comm {

// What all groups of one rank share.
struct HostWorld {
  std::shared_ptr<Control> control;
  TransportChoice transport = TransportChoice::kAuto;
  std::shared_ptr<HostMemory> memory = std::make_shared<HostMemory>();

  [[nodiscard]] bool shares_memory_with(int peer) const;
};

class HostGroup {
 public:
  // `id` names the group in exchanges, once per world; `members`: world ranks in group order.
  HostGroup(std::shared_ptr<HostWorld> world, std::string id, std::vector<int> members);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(members_.size()); }
  [[nodiscard]] const std::vector<int>& members() const { return members_; }
  [[nodiscard]] const std::string& id() const { return id_; }
  [[nodiscard]] const std::shared_ptr<HostWorld>& world() const { return world_; }
  [[nodiscard]] Control& control() const { return *world_->control; }
  [[nodiscard]] HostMemory& memory() const { return *world_->memory; }
  [[nodiscard]] Transport transport() const;
  // The members that share memory with this rank, including itself; ascending world ranks.
  [[nodiscard]] const std::vector<int>& neighbours() const { return neighbours_; }
  [[nodiscard]] bool shares_memory() const { return neighbours_.size() == members_.size(); }

  // Starts the next call: posts it, waits for every member's call and compares them; result[r] is
  // rank r's. If they differ, throws MismatchError on every rank. While calls_take_bytes(), the
  // calls go over Control together with `bytes`. A planned call that all have made before is not
  // posted if calls would go over channels. `act` names a wait in the call, instead of its
  // operation.
  std::span<const HostCall> agree(HostCall mine, std::span<const std::byte> bytes = {},
                                  std::string_view act = {});
  // True until a group without shared memory has its channels; the same on every member.
  [[nodiscard]] bool calls_take_bytes() const { return size() > 1 && !shares_memory() && !open_; }
  // The bytes sent with rank r's last call.
  [[nodiscard]] std::span<const std::byte> bytes_of(int rank) const;
  [[nodiscard]] std::uint64_t sequence() const { return sequence_; }
  // Null if memory is shared: comparing calls costs nothing there.
  [[nodiscard]] PlannedCalls* planned_calls() {
    return planned_calls_ ? &*planned_calls_ : nullptr;
  }
  // The end of a call that accessed peers' memory. Only if shares_memory().
  void finish(bool nonfinite) { board_->finish(nonfinite); }
  bool wait_finished() { return board_->wait_finished(waiting_); }
  // Between the steps of such a call, equally often on every rank.
  void arrive() { board_->arrive(); }
  void wait_arrived() { board_->wait_arrived(waiting_); }

  // Collective, only if shares_memory(): allocates every rank's scratch when it is first needed.
  void open_scratch();
  // A rank's buffer for the tile, of TilePlan::tile_bytes(size()): one of two, alternating.
  [[nodiscard]] std::byte* scratch(int rank, std::int64_t tile) const {
    return scratch_[static_cast<std::size_t>(rank)] +
           static_cast<std::size_t>(tile % 2) * tile_bytes_;
  }

  // Collective: makes the rings of a group that shares memory, or the links of one that does not,
  // when they are first needed [Note: links at the first call].
  void open_channels();
  // The channel to another rank; valid after open_channels().
  [[nodiscard]] Channel& channel(int rank) { return *channels_[static_cast<std::size_t>(rank)]; }
  // The channel to all ranks at once; null if the group does not share memory.
  [[nodiscard]] Multicast* multicast() { return multicast_.get(); }
  [[nodiscard]] std::size_t message_bytes() const { return message_bytes_; }
  // Waits until `ready()`; `peer()` is the group rank waited for.
  void wait(const std::function<bool()>& ready, const std::function<int()>& peer);

  // One message from every member to every member through Control, in group order.
  [[nodiscard]] std::vector<std::string> exchange(const std::string& what,
                                                  const std::string& message);

 private:
  [[nodiscard]] std::vector<std::shared_ptr<SharedSegment>> share_segment(std::size_t size,
                                                                          const std::string& what);
  [[nodiscard]] std::size_t agree_message_bytes();
  void open_lines();
  void open_rings();
  void open_sockets();
  [[nodiscard]] std::span<const HostCall> post_by_channels(const HostCall& mine);
  [[nodiscard]] std::span<const HostCall> post_by_control(const HostCall& mine,
                                                          std::span<const std::byte> bytes);
  [[nodiscard]] int index_of(int world_rank) const;

  std::shared_ptr<HostWorld> world_;
  std::string id_;
  std::vector<int> members_;
  std::vector<int> ascending_;
  std::vector<int> neighbours_;
  int rank_ = 0;
  std::uint64_t sequence_ = 0;
  WaitState waiting_{.operation = "connect"};
  RankLines own_lines_{};  // for a rank that shares memory with no other
  std::vector<std::shared_ptr<SharedSegment>> segments_;
  std::vector<RankLines*> lines_;  // by group rank; null: no shared memory
  GroupLines* group_lines_ = nullptr;
  std::unique_ptr<HostBoard> board_;
  std::vector<std::byte*> scratch_;  // by group rank; empty until it is needed
  std::size_t tile_bytes_ = 0;
  std::size_t message_bytes_ = 0;
  std::vector<std::unique_ptr<Channel>> channels_;
  std::unique_ptr<Multicast> multicast_;
  std::unique_ptr<Waiter> waiter_;
  SocketWaiter* sockets_ = nullptr;  // the waiter of a group without shared memory
  bool open_ = false;                // whether the channels exist
  std::vector<HostCall> calls_;
  std::vector<std::string> messages_;  // the last calls sent over Control
  std::vector<std::uint32_t> seen_dropped_;
  std::optional<PlannedCalls> planned_calls_;
  std::shared_ptr<void> wake_;  // last member: destroyed before what it wakes
};

}  // namespace hsdp::comm
