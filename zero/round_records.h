// Which units the ranks of a unit gather want in which order, learned from the passes before. A
// pass is what they gather between two ends: a microbatch, say [Note: rounds of a unit gather].
//
// Pure state. The same on every rank but for what this one wants in the pass under way: all else
// that it is told was said by all ranks to all. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace hsdp::zero {

class RoundRecords {
 public:
  // The unit that all ranks want in the first round of a pass, if it is the same. From here on
  // there may be a record to follow.
  void begin(std::optional<int> first);
  [[nodiscard]] bool follows() const { return followed_.has_value(); }
  // The units that are still to be gathered, in order; none without a record.
  [[nodiscard]] std::span<const int> coming() const;
  // So many of them are.
  void advance(std::size_t count) { position_ += count; }

  // This rank wants that unit.
  void want(int unit);
  // Of all that it wanted in this pass.
  [[nodiscard]] std::uint64_t hash() const { return hash_; }
  // In this pass a rank wants a unit that the record does not have any more, as all ranks know.
  void depart() { departed_ = true; }
  // The pass is over. `same`: the ranks' hashes are equal, so each knows what all wanted.
  void end(bool same);

 private:
  using Record = std::optional<std::size_t>;
  using Key = std::pair<Record, int>;  // the pass before, or any; the first unit
  // Where it lies; all others are forgotten where there would be too many.
  [[nodiscard]] std::size_t number_of(const std::vector<int>& units);

  std::vector<std::vector<int>> records_;  // each once
  std::map<Key, std::size_t> next_;        // which record came then
  Record before_;                          // that the pass before left or followed
  bool departed_ = false;
  Record followed_;
  std::size_t position_ = 0;
  std::vector<int> wanted_;
  std::uint64_t hash_ = 0;
};

}  // namespace hsdp::zero
