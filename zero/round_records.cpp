#include "zero/round_records.h"

#include <algorithm>

#include "hsdp/comm/host/host_call.h"

namespace hsdp::zero {
namespace {

constexpr std::size_t kLongest = 4096;  // an evaluation may be one endless pass
constexpr std::size_t kMostRecords = 64;

}  // namespace

void RoundRecords::begin(std::optional<int> first) {
  if (!first) return;
  auto found = next_.find({before_, *first});
  if (found == next_.end()) found = next_.find({std::nullopt, *first});
  if (found == next_.end()) return;
  followed_ = found->second;
  position_ = 1;
}

std::span<const int> RoundRecords::coming() const {
  return followed_ ? std::span(records_[*followed_]).subspan(position_) : std::span<const int>();
}

void RoundRecords::want(int unit) {
  if (wanted_.size() <= kLongest) wanted_.push_back(unit);
  hash_ = comm::TermsHash().add(hash_).add(static_cast<std::uint64_t>(unit)).value();
}

std::size_t RoundRecords::number_of(const std::vector<int>& units) {
  const auto known = std::ranges::find(records_, units);
  if (known != records_.end()) return static_cast<std::size_t>(known - records_.begin());
  if (records_.size() == kMostRecords) {
    records_.clear();
    next_.clear();
    before_.reset();
  }
  records_.push_back(units);
  return records_.size() - 1;
}

void RoundRecords::end(bool same) {
  if (!same || wanted_.size() > kLongest) {
    // Asking in every round is faster than leaving a record one rank after the other.
    if (departed_) std::erase_if(next_, [this](const auto& e) { return followed_ == e.second; });
    before_ = followed_;
  } else if (!wanted_.empty()) {
    const std::size_t record = number_of(wanted_);
    next_[{before_, wanted_.front()}] = next_[{std::nullopt, wanted_.front()}] = record;
    before_ = record;
  }
  followed_.reset();
  departed_ = false;
  wanted_.clear();
  hash_ = 0;
}

}  // namespace hsdp::zero
