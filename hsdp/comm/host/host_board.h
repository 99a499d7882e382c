// The control block of a group whose ranks all share memory: a few cache lines for each rank, in
// memory of its own, where it posts its calls and says when it is through with them.
//
// Used by one thread of a rank at a time. Waits as host_wait.h says.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "hsdp/comm/host/host_call.h"
#include "hsdp/comm/host/host_wait.h"

namespace hsdp::comm {

// One rank's lines; zero is the right initial value of everything.
struct RankLines {
  struct alignas(64) Posted {
    std::atomic<std::uint64_t> sequence;
    HostCall call;
  };
  // By parity of the sequence: a rank posts call k + 2 only after every rank came to call k + 1,
  // thus has read call k.
  std::array<Posted, 2> posted;
  alignas(128) std::atomic<std::uint64_t> finished;  // 2 * sequence + (a result was not finite)
  alignas(128) std::atomic<std::uint64_t> arrived;   // how often, since the group was made
  Bell bell;
};

class HostBoard {
 public:
  // `lines` and `members` (world ranks) in group order.
  HostBoard(std::vector<RankLines*> lines, std::vector<int> members, int rank, Control& control);

  // Posts this rank's call and waits for everyone's; result[r] is rank r's. Does not compare.
  std::span<const HostCall> post(std::uint64_t sequence, const HostCall& mine, WaitState waiting);
  // This rank has done its part of the call: it reads and writes no peer's memory any more.
  void finish(std::uint64_t sequence, bool nonfinite);
  // Until every rank has finished; true when any of them saw a result that is not finite.
  bool wait_finished(std::uint64_t sequence, WaitState waiting);
  // A step inside a call: this rank has come to its end; then until every rank has.
  void arrive();
  void wait_arrived(WaitState waiting);

  [[nodiscard]] Bell& bell(int rank) { return lines_[static_cast<std::size_t>(rank)]->bell; }
  [[nodiscard]] Bed& bed() { return bed_; }

 private:
  void ring_peers();

  std::vector<RankLines*> lines_;
  std::vector<int> members_;
  std::vector<HostCall> calls_;
  std::size_t rank_;
  std::uint64_t arrivals_ = 0;
  Control& control_;
  Bed bed_;
};

}  // namespace hsdp::comm
