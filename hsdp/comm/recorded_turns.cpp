#include "hsdp/comm/recorded_turns.h"

#include <algorithm>
#include <utility>

namespace hsdp::comm {

void RecordedTurns::tell(const LaneCount& entry) {
  if (entry.lane != kFollow) return turns_.tell(entry.lane, entry.count);
  turns_.follow(entry.count);
  asked_to_stop_ = false;
}

std::int64_t RecordedTurns::choose(int lane, bool ends_step) {
  const std::int64_t length = steps_.add(lane, ends_step);
  return adding_ || setting_.members.size() == 1 ? 0 : length;
}

void RecordedTurns::ask_to_stop() {
  asked_to_stop_ = true;
  if (!setting_.is_first) return setting_.say({{kStop, 0}});
  begin_stop();
}

void RecordedTurns::distrust() {
  if (!setting_.is_first) return setting_.say({{kDistrust, 0}});
  steps_.distrust();
}

// By the first rank: all say how far they are, and go as far as the furthest of them.
void RecordedTurns::begin_stop() {
  if (!turns_.follows() || stopping_ || adding_) return;
  stopping_ = true;
  turns_.freeze();
  setting_.say({{kFreeze, 0}});
  add_taken(setting_.members.front(), turns_.taken());
}

void RecordedTurns::leave() {
  if (!turns_.follows()) return;
  if (!setting_.is_first) return setting_.say({{kGone, turns_.taken()}});
  // It has issued all, so it is the furthest.
  std::vector<LaneCount> entries{{kEnd, turns_.taken()}};
  if (!std::exchange(stopping_, false)) {
    turns_.freeze();
    entries.insert(entries.begin(), {kFreeze, 0});
  }
  steps_.restart();
  end(turns_.taken());
  setting_.say(entries);
}

bool RecordedTurns::hear(int from, const LaneCount& entry) {
  switch (entry.lane) {
    case kStop:
      begin_stop();
      return true;
    case kDistrust:
      steps_.distrust();
      return true;
    case kTaken:
    case kGone:
      if (turns_.follows()) add_taken(from, entry.count);
      return true;
    case kFreeze:
      turns_.freeze();
      setting_.say({{kTaken, turns_.taken()}});
      return true;
    case kEnd:
      end(entry.count);
      return true;
    case kHere:
      add_here(from, entry.count);
      return true;
    case kAllHere:
      met_ = entry.count;
      return true;
    default:
      return false;
  }
}

bool RecordedTurns::meet() {
  const std::int64_t taken = turns_.taken();
  if (std::exchange(said_here_, taken) == taken) return false;
  if (setting_.is_first) {
    add_here(setting_.members.front(), taken);
  } else {
    setting_.say({{kHere, taken}});
  }
  return true;
}

void RecordedTurns::add_here(int by, std::int64_t taken) {
  if (taken < here_turn_) return;  // of a record that has ended
  if (std::exchange(here_turn_, taken) != taken) here_.clear();
  here_.insert(by);
  if (here_.size() < setting_.members.size()) return;
  met_ = taken;
  setting_.say({{kAllHere, taken}});
}

void RecordedTurns::add_taken(int by, std::int64_t taken) {
  taken_by_[by] = taken;
  if (!stopping_ || taken_by_.size() < setting_.members.size()) return;
  std::int64_t furthest = 0;
  for (const auto& [_, count] : taken_by_) furthest = std::max(furthest, count);
  stopping_ = false;
  steps_.broke(turns_.rounds());
  end(furthest);
  setting_.say({{kEnd, furthest}});
}

// Counts what lanes have got by the record, up to its end.
void RecordedTurns::end(std::int64_t taken) {
  taken_by_.clear();
  for (const auto& [lane, count] : turns_.end_at(taken)) setting_.count(lane, count);
}

std::optional<int> RecordedTurns::awaited() const {
  if (adding_) return std::nullopt;
  const bool ends = stopping_ || asked_to_stop_ || turns_.is_frozen();
  const std::int64_t taken = turns_.taken();
  if (!ends && (said_here_ != taken || has_met())) return std::nullopt;
  const auto is_late = [&](int member) {
    if (!setting_.is_first || (ends && !stopping_)) return true;
    if (ends) return !taken_by_.contains(member);
    return here_turn_ != taken || !here_.contains(member);
  };
  return *std::ranges::find_if(setting_.members, is_late);
}

void RecordedTurns::begin_adding(bool were_several) {
  adding_ = true;
  if (were_several) {
    turns_.freeze();
  } else {
    turns_ = {};
    said_here_ = met_ = here_turn_ = -1;
  }
}

void RecordedTurns::end_adding(std::optional<std::int64_t> furthest) {
  adding_ = false;
  if (!furthest) return;
  steps_.restart();
  end(*furthest);
  setting_.say({{kEnd, *furthest}});
}

}  // namespace hsdp::comm
