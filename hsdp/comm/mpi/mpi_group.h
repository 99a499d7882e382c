// One rank's end of a group on the MPI engine: its members, the agreement before every collective,
// and how it waits for messages.
//
// One thread at a time may use it; several groups of a world may move data at once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/control.h"
#include "hsdp/comm/host/host_call.h"
#include "hsdp/comm/host/host_wait.h"
#include "hsdp/comm/mpi/mpi_progress.h"
#include "hsdp/comm/mpi/mpi_transfers.h"
#include "hsdp/comm/planned_calls.h"

namespace hsdp::comm {

// What all groups of one rank share.
struct MpiWorld {
  std::shared_ptr<Control> control;
  std::shared_ptr<MpiLink> link;  // null in a world of one rank
  std::unique_ptr<MpiProgress> progress;
  std::shared_ptr<void> failure_watch;
  std::atomic<int> next_group{1};  // 0 is the world

  // A tag that no other rank and no later call uses; -1 if none is left.
  [[nodiscard]] int reserve_tag();
};

// Waits by polling, since MPI wakes no thread. Sleeps longer the longer it has waited.
class PollingWaiter : public Waiter {
 public:
  explicit PollingWaiter(Bell& bell) : Waiter(bell) {}
  void start_wait() { start_ = std::chrono::steady_clock::now(); }
  void sleep(std::uint32_t seen, std::chrono::milliseconds at_most) override;

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

class MpiGroup {
 public:
  // `id` names the group in exchanges and is used once per world; `members` are world ranks in
  // group order; `tag` is the same on all of them and different from other groups'.
  struct Place {
    std::string id;
    std::vector<int> members;
    int tag = 0;
  };
  MpiGroup(std::shared_ptr<MpiWorld> world, Place place);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(place_.members.size()); }
  [[nodiscard]] const std::vector<int>& members() const { return place_.members; }
  [[nodiscard]] const std::string& id() const { return place_.id; }
  [[nodiscard]] const std::shared_ptr<MpiWorld>& world() const { return world_; }
  [[nodiscard]] Control& control() const { return *world_->control; }
  [[nodiscard]] std::uint64_t sequence() const { return sequence_; }
  [[nodiscard]] int peer(int rank) const { return place_.members[static_cast<std::size_t>(rank)]; }

  // Starts the next call: every member tells every other what it is about to do. Throws
  // MismatchError on every rank if they differ. It returns when all have arrived, so it is also a
  // barrier; for a planned call that all have made before it returns immediately. For `act` see
  // CallLabel.
  void agree(const HostCall& mine, std::string_view act = {});
  // Null in a group of one.
  [[nodiscard]] PlannedCalls* planned_calls() {
    return planned_calls_ ? &*planned_calls_ : nullptr;
  }
  [[nodiscard]] MpiTransfers transfers() const { return {world_->link, place_.tag}; }
  [[nodiscard]] int tag() const { return place_.tag; }
  // Buffer `which`, of at least `size` bytes; the group's next call may reuse it.
  [[nodiscard]] std::shared_ptr<std::byte[]> scratch(std::size_t which, std::size_t size);
  void wait(MpiTransfers& transfers);

  // Call it after a call that failed half way: see MpiLink::abandon.
  void abandon();

  // One message from every member to every member through Control, in group order.
  [[nodiscard]] std::vector<std::string> exchange(const std::string& what,
                                                  const std::string& message);

 private:
  [[nodiscard]] int index_of(int world_rank) const;
  [[noreturn]] void throw_transfer_failed(const std::exception& error);

  struct Scratch {
    std::shared_ptr<std::byte[]> bytes;
    std::size_t size = 0;
  };

  std::shared_ptr<MpiWorld> world_;
  Place place_;
  std::vector<Scratch> scratch_;
  std::vector<int> ascending_;
  int rank_ = 0;
  std::uint64_t sequence_ = 0;
  WaitState waiting_{.operation = "connect"};
  Bell bell_{};
  PollingWaiter waiter_{bell_};
  std::optional<PlannedCalls> planned_calls_;  // empty in a group of one
};

}  // namespace hsdp::comm
