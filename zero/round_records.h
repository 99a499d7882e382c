// Which units the ranks of a unit gather want in which order, learned from earlier passes [Note:
// rounds of a unit gather].
//
// Pure state, the same on every rank except for what this rank wants in the current pass. One
// thread at a time.
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
  // Begins a pass. `first`: the unit that all ranks want in its first round; none if they differ.
  // After it there may be a record to follow.
  void begin(std::optional<int> first);
  [[nodiscard]] bool follows() const { return followed_.has_value(); }
  // The units still to be gathered by the record, in order; none without a record.
  [[nodiscard]] std::span<const int> coming() const;
  // That many of them were gathered.
  void advance(std::size_t count) { position_ += count; }

  // This rank wants that unit.
  void want(int unit);
  // A hash of all units that this rank wanted in this pass.
  [[nodiscard]] std::uint64_t hash() const { return hash_; }
  // All ranks know that one wants a unit which the record does not have any more.
  void depart() { departed_ = true; }
  // Ends the pass. `same`: the ranks' hashes are equal, so each knows what all wanted.
  void end(bool same);

 private:
  using Record = std::optional<std::size_t>;
  using Key = std::pair<Record, int>;  // the previous pass, or any; the first unit
  // The index of the record of these units, added if there is none. Forgets all others if there are
  // too many.
  [[nodiscard]] std::size_t number_of(const std::vector<int>& units);

  std::vector<std::vector<int>> records_;  // each once
  std::map<Key, std::size_t> next_;        // the record that followed
  Record before_;                          // of the previous pass
  bool departed_ = false;
  Record followed_;
  std::size_t position_ = 0;
  std::vector<int> wanted_;
  std::uint64_t hash_ = 0;
};

}  // namespace hsdp::zero
