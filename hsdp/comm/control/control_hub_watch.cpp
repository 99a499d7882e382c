// ControlHub's checks over time: beats, silence, and waits that last too long.
#include <algorithm>

#include "hsdp/comm/control/control_hub.h"

namespace hsdp::comm {
namespace {

// A rank may leave after doing its part while a beat that reports a wait for it is on its way, or
// before the waiting thread runs again. Counted in beats: a rank without a core sends none.
constexpr std::int64_t kBeatsAfterLeft = 4;

}  // namespace

void ControlHub::tick() {
  if (ended_ || left_) return;
  send_beats();
  if (!welcomed_) {
    judge_vanished();
    if (ended_ || clock_.now() - started_ < options_.timeout) return;
    const std::string trouble = options_.trouble_at_door();
    WorldEnd world_end;
    world_end.failure.kind = FailureKind::kTimeout;
    world_end.failure.ranks = missing();
    world_end.failure.message =
        "rendezvous: " + ranks_text(missing(), options_.own.size) + " did not join within " +
        seconds_text(options_.timeout) + "; " +
        (trouble.empty() ? "check that all ranks were started and still run"
                         : trouble + " (rank 0 of " + std::to_string(options_.own.size) + ")");
    return end(std::move(world_end));
  }
  const std::vector<RankReport> all = reports();
  judge_waits_on_closed(all);
  if (ended_) return;
  if (auto world_end = judge(all, options_.timeout)) end(std::move(*world_end));
}

// A live rank whose connection ended before the welcome soon returns.
void ControlHub::judge_vanished() {
  constexpr std::chrono::milliseconds kForReturning{1'000};
  for (std::size_t rank = 0; rank < peers_.size() && !ended_; ++rank) {
    const Peer& peer = peers_[rank];
    if (peer.vanished.empty() || clock_.now() - peer.last_heard < kForReturning) continue;
    lost(static_cast<int>(rank), peer.vanished);
  }
}

void ControlHub::send_beats() {
  BeatFrame beat;
  beat.missing = missing();
  const FrameBytes frame = make_frame(FrameType::kBeat, beat.encode());
  for (const Peer& peer : peers_) {
    // A peer that does not read needs no more beats.
    if (peer.link && peer.link->idle()) peer.link->send(frame);
  }
}

std::vector<int> ControlHub::missing_in(const Exchange& exchange) const {
  std::vector<int> ranks;
  const std::vector<int>& members = groups_.at(exchange.group);
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (!exchange.came[i]) ranks.push_back(members[i]);
  }
  return ranks;
}

std::vector<RankReport> ControlHub::reports() const {
  std::vector<RankReport> all(peers_.size());
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    const Peer& peer = peers_[rank];
    RankReport& report = all[rank];
    report.closed = peer.phase == Phase::kClosed;
    report.parent = peer.parent;
    if (rank != 0) report.silent = clock_.now() - peer.last_heard;
    for (const BeatWait& wait : peer.waits) {
      std::vector<int> awaited;
      if (wait.exchange != 0) {
        const auto name = exchange_names_.find(wait.exchange);
        // Not pending: it was answered after that beat.
        if (name == exchange_names_.end()) continue;
        awaited = missing_in(exchanges_.find(name->second)->second);
      } else if (wait.peer >= 0 && wait.peer < options_.own.size) {
        awaited = {wait.peer};
      }
      report.waits.push_back(wait);
      report.awaited.push_back(std::move(awaited));
    }
  }
  return all;
}

void ControlHub::judge_waits_on_closed(const std::vector<RankReport>& reports) {
  std::map<std::pair<int, std::uint32_t>, std::int64_t> still;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const RankReport& report = reports[rank];
    for (std::size_t i = 0; i < report.waits.size(); ++i) {
      const auto& awaited = report.awaited[i];
      const auto closed = std::find_if(awaited.begin(), awaited.end(), [&](int peer) {
        return reports[static_cast<std::size_t>(peer)].closed;
      });
      if (closed == awaited.end()) continue;
      const BeatWait& wait = report.waits[i];
      const std::pair<int, std::uint32_t> key{static_cast<int>(rank), wait.id};
      const auto seen = waits_on_closed_.find(key);
      const std::int64_t beats = peers_[rank].beat_count;
      const std::int64_t since = seen == waits_on_closed_.end() ? beats : seen->second;
      still[key] = since;
      // A rank's posts precede its goodbye, so a missing post will never arrive.
      if (wait.exchange == 0 && beats - since < kBeatsAfterLeft) continue;
      const int above = peers_[static_cast<std::size_t>(*closed)].closed_by;
      WorldEnd world_end =
          end_by_loss(above >= 0 ? above : *closed, options_.own.size, "it closed its world");
      world_end.operation = wait.operation;
      world_end.bucket = wait.bucket;
      return end(std::move(world_end));
    }
  }
  waits_on_closed_ = std::move(still);
}

}  // namespace hsdp::comm
