#include "hsdp/comm/turns.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace hsdp::comm {

void Turns::tell(int lane, std::int64_t count) {
  known_ += count;
  for (; count > 0; --count) {
    told_.push_back(lane);
    history_.push_back(lane);
    if (std::ssize(history_) > kMostRecorded) history_.pop_front();
  }
}

void Turns::follow(std::int64_t length) {
  record_.assign(history_.end() - std::min<std::int64_t>(length, std::ssize(history_)),
                 history_.end());
  begin_ = known_;
}

int Turns::recorded(std::int64_t turn) const {
  return record_[static_cast<std::size_t>((turn - begin_) % std::ssize(record_))];
}

std::optional<int> Turns::next() const {
  if (!is_recorded()) return told_.empty() ? std::nullopt : std::optional(told_.front());
  return freezes_ > 0 ? std::nullopt : std::optional(recorded(taken_));
}

void Turns::take() {
  if (!is_recorded()) told_.pop_front();
  ++taken_;
}

std::map<int, std::int64_t> Turns::end_at(std::int64_t taken) {
  --freezes_;
  std::map<int, std::int64_t> counts;
  if (!follows()) return counts;
  known_ = std::max(taken, begin_);
  for (std::int64_t turn = std::max(taken_, begin_); turn < known_; ++turn) {
    told_.push_back(recorded(turn));
  }
  const std::int64_t rounds = (known_ - begin_) / std::ssize(record_);
  const std::int64_t rest = (known_ - begin_) % std::ssize(record_);
  for (std::int64_t i = 0; i < std::ssize(record_); ++i) {
    counts[record_[static_cast<std::size_t>(i)]] += rounds + (i < rest ? 1 : 0);
  }
  record_.clear();
  return counts;
}

std::int64_t StepRecord::add(int lane, bool ends_step) {
  ++counts_[lane];
  ++length_;
  if (!ends_step || (ending_lane_ >= 0 && lane > ending_lane_)) return 0;
  const bool same = lane == ending_lane_ && counts_ == before_;
  ending_lane_ = lane;
  equal_ = same ? equal_ + 1 : 0;
  before_ = std::exchange(counts_, {});
  const std::int64_t length = std::exchange(length_, 0);
  return equal_ >= wanted_ && length <= Turns::kMostRecorded ? length : 0;
}

void StepRecord::broke(std::int64_t rounds) {
  wanted_ =
      rounds >= kLong * wanted_ ? std::max(wanted_ / 2, 1) : std::min(2 * wanted_, kMostEqual);
  restart();
}

void StepRecord::restart() {
  ending_lane_ = -1;
  counts_.clear();
  before_.clear();
  length_ = 0;
  equal_ = 0;
}

}  // namespace hsdp::comm
