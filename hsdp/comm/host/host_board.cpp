#include "hsdp/comm/host/host_board.h"

#include <utility>

namespace hsdp::comm {

HostBoard::HostBoard(GroupLines& group, std::vector<RankLines*> lines, std::vector<int> members,
                     int rank, Control& control)
    : group_(group),
      lines_(std::move(lines)),
      members_(std::move(members)),
      calls_(lines_.size()),
      rank_(static_cast<std::size_t>(rank)),
      control_(control),
      waiter_(group.bell) {}

// Writes the rank's own line first, so that a rank that has been counted is never named as missing.
void HostBoard::come(GroupLines::Meeting& meeting, Lines own, std::uint64_t number) {
  (lines_[rank_]->*own).store(number);
  if (meeting.arrivals.fetch_add(1) + 1 < number * lines_.size()) return;
  meeting.passed.store(number);
  group_.bell.ring_if_sleeping();
}

void HostBoard::wait(const GroupLines::Meeting& meeting, Lines own, std::uint64_t number,
                     WaitState waiting) {
  std::size_t next = 0;
  wait_until(
      control_, waiter_, waiting, [&] { return meeting.passed.load() >= number; },
      [&] {
        while (next < lines_.size() && (lines_[next]->*own).load() >= number) ++next;
        return next < lines_.size() ? members_[next] : -1;
      });
}

std::span<const HostCall> HostBoard::post(const HostCall& mine, WaitState waiting) {
  const std::size_t parity = ++posts_ % 2;
  lines_[rank_]->posted[parity].call = mine;
  arrive();
  wait_arrived(waiting);
  for (std::size_t r = 0; r < lines_.size(); ++r) calls_[r] = lines_[r]->posted[parity].call;
  return calls_;
}

void HostBoard::arrive() { come(group_.steps, &RankLines::steps, ++steps_); }

void HostBoard::wait_arrived(WaitState waiting) {
  wait(group_.steps, &RankLines::steps, steps_, waiting);
}

void HostBoard::finish(bool nonfinite) {
  ++ends_;
  if (nonfinite) group_.nonfinite_end.store(ends_);
  come(group_.ends, &RankLines::ends, ends_);
}

bool HostBoard::wait_finished(WaitState waiting) {
  wait(group_.ends, &RankLines::ends, ends_, waiting);
  return group_.nonfinite_end.load() == ends_;
}

}  // namespace hsdp::comm
