#include "hsdp/comm/host/host_board.h"

#include <utility>

namespace hsdp::comm {

HostBoard::HostBoard(std::vector<RankLines*> lines, std::vector<int> members, int rank,
                     Control& control)
    : lines_(std::move(lines)),
      members_(std::move(members)),
      calls_(lines_.size()),
      rank_(static_cast<std::size_t>(rank)),
      control_(control),
      bed_(lines_[rank_]->bell) {}

void HostBoard::ring_peers() {
  for (std::size_t r = 0; r < lines_.size(); ++r) {
    if (r != rank_) lines_[r]->bell.ring_if_sleeping();
  }
}

std::span<const HostCall> HostBoard::post(std::uint64_t sequence, const HostCall& mine,
                                          WaitState waiting) {
  const std::size_t parity = sequence % 2;
  RankLines::Posted& posted = lines_[rank_]->posted[parity];
  posted.call = mine;
  posted.sequence.store(sequence);
  ring_peers();
  std::size_t next = 0;
  wait_until(
      control_, bed_, waiting,
      [&] {
        for (; next < lines_.size(); ++next) {
          const RankLines::Posted& other = lines_[next]->posted[parity];
          if (other.sequence.load() != sequence) return false;
          calls_[next] = other.call;
        }
        return true;
      },
      [&] { return members_[next]; });
  return calls_;
}

void HostBoard::finish(std::uint64_t sequence, bool nonfinite) {
  lines_[rank_]->finished.store(2 * sequence + (nonfinite ? 1 : 0));
  ring_peers();
}

void HostBoard::arrive() {
  lines_[rank_]->arrived.store(++arrivals_);
  ring_peers();
}

void HostBoard::wait_arrived(WaitState waiting) {
  std::size_t next = 0;
  wait_until(
      control_, bed_, waiting,
      [&] {
        while (next < lines_.size() && lines_[next]->arrived.load() >= arrivals_) ++next;
        return next == lines_.size();
      },
      [&] { return members_[next]; });
}

bool HostBoard::wait_finished(std::uint64_t sequence, WaitState waiting) {
  std::size_t next = 0;
  bool nonfinite = false;
  wait_until(
      control_, bed_, waiting,
      [&] {
        for (; next < lines_.size(); ++next) {
          const std::uint64_t finished = lines_[next]->finished.load();
          if (finished / 2 < sequence) return false;
          nonfinite = nonfinite || finished == 2 * sequence + 1;
        }
        return true;
      },
      [&] { return members_[next]; });
  return nonfinite;
}

}  // namespace hsdp::comm
