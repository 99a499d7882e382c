// The control block of a group whose ranks all share memory: a few cache lines for each rank and a
// few for the group, where the ranks post their calls and meet.
//
// A meeting is a counter of the group: who comes last lets all go on, and wakes all sleepers with
// one system call. Each rank's own lines say where it is, so that a wait can name who is missing
// [Note: meetings]. Used by one thread of a rank at a time. Waits as host_wait.h says.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "hsdp/comm/host/host_call.h"
#include "hsdp/comm/host/host_wait.h"

namespace hsdp::comm {

// What a rank writes; zero is the right initial value of everything.
struct RankLines {
  struct alignas(64) Posted {
    HostCall call;
  };
  // By parity of the post: a rank posts call k + 2 only after every rank came to call k + 1, thus
  // has read call k.
  std::array<Posted, 2> posted;
  alignas(128) std::atomic<std::uint64_t> steps;  // meetings that this rank has come to
  std::atomic<std::uint64_t> ends;
  Bell bell;  // of this rank alone: channels ring it
};

// What all ranks write, in the segment of the first; zero is the right initial value.
struct GroupLines {
  struct Meeting {
    alignas(128) std::atomic<std::uint64_t> arrivals;  // of all ranks, since the group was made
    alignas(128) std::atomic<std::uint64_t> passed;    // how many meetings are complete
  };
  Meeting steps;
  Meeting ends;
  alignas(128) std::atomic<std::uint64_t> nonfinite_end;  // the last end with such a result
  Bell bell;                                              // rung when a meeting is complete
};

class HostBoard {
 public:
  // `lines` and `members` (world ranks) in group order.
  HostBoard(GroupLines& group, std::vector<RankLines*> lines, std::vector<int> members, int rank,
            Control& control);

  // Posts this rank's call and waits for everyone's; result[r] is rank r's. Does not compare.
  std::span<const HostCall> post(const HostCall& mine, WaitState waiting);
  // A step inside a call: this rank has come to its end; then until every rank has.
  void arrive();
  void wait_arrived(WaitState waiting);
  // This rank has done its part of the call: it reads and writes no peer's memory any more.
  void finish(bool nonfinite);
  // Until every rank has finished; true when any of them saw a result that is not finite. A rank
  // that need not know may go on to the next post without.
  bool wait_finished(WaitState waiting);

  // What this rank sleeps on.
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
  std::uint64_t steps_ = 0;  // posts included
  std::uint64_t ends_ = 0;
  Control& control_;
  Waiter waiter_;
};

}  // namespace hsdp::comm
