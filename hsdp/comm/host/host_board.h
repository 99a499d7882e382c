// The control block of a group whose ranks all share memory: a few cache lines per rank and a few
// for the group, where the ranks post their calls and meet.
//
// A meeting is a counter of the group: the last rank to arrive lets all continue, and wakes all
// sleepers with one system call. Each rank's own lines say where it is, so that a wait can name the
// missing ranks [Note: meetings]. One thread per rank at a time. Waits as host_wait.h says.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "hsdp/comm/host/host_call.h"
#include "hsdp/comm/host/host_wait.h"

namespace hsdp::comm {

// What one rank writes; zero is the right initial value of everything.
struct RankLines {
  struct alignas(64) Posted {
    HostCall call;
  };
  // By parity of the post: a rank posts call k + 2 only after every rank has arrived at call k + 1,
  // and so has read call k.
  std::array<Posted, 2> posted;
  alignas(128) std::atomic<std::uint64_t> steps;  // meetings that this rank has arrived at
  std::atomic<std::uint64_t> ends;
  Bell bell;  // this rank's only: its channels ring it
};

// What all ranks write, in the first rank's segment; zero is the right initial value.
struct GroupLines {
  struct Meeting {
    alignas(128) std::atomic<std::uint64_t> arrivals;  // of all ranks, since the group was made
    alignas(128) std::atomic<std::uint64_t> passed;    // number of complete meetings
  };
  Meeting steps;
  Meeting ends;
  alignas(128) std::atomic<std::uint64_t> nonfinite_end;  // the last end with a non-finite result
  Bell bell;                                              // rung when a meeting is complete
};

class HostBoard {
 public:
  // `lines` and `members` (world ranks) are in group order.
  HostBoard(GroupLines& group, std::vector<RankLines*> lines, std::vector<int> members, int rank,
            Control& control);

  // Posts this rank's call and waits for all others; result[r] is rank r's. Does not compare them.
  std::span<const HostCall> post(const HostCall& mine, WaitState waiting);
  // A step inside a call: announces that this rank has arrived; then waits for all ranks.
  void arrive();
  void wait_arrived(WaitState waiting);
  // Announces that this rank has finished its part: it no longer accesses peers' memory.
  void finish(bool nonfinite);
  // Waits until every rank has finished; returns whether any saw a non-finite result. A rank that
  // need not know may skip this before the next post.
  bool wait_finished(WaitState waiting);

  // The bell that this rank sleeps on.
  [[nodiscard]] Bell& bell() { return group_.bell; }

 private:
  using Lines = std::atomic<std::uint64_t> RankLines::*;

  void come(GroupLines::Meeting& meeting, Lines own, std::uint64_t number);
  void wait(const GroupLines::Meeting& meeting, Lines own, std::uint64_t number, WaitState waiting);

  GroupLines& group_;
  std::vector<RankLines*> lines_;
  std::vector<int> members_;
  std::vector<HostCall> calls_;
  std::size_t rank_;
  std::uint64_t posts_ = 0;
  std::uint64_t steps_ = 0;  // including posts
  std::uint64_t ends_ = 0;
  Control& control_;
  Waiter waiter_;
};

}  // namespace hsdp::comm
