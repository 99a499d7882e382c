// How a buffer's elements are divided among the ranks of a group. Plain data, no communication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hsdp {

// Rank r owns [begin(r), begin(r + 1)) of `count` elements.
class RowCut {
 public:
  // The default: rows of c = ceil(count / size), the last ones shorter or empty.
  RowCut(std::int64_t count, int size);
  // Explicit, non-decreasing offsets: size + 1 of them, the first 0.
  explicit RowCut(std::vector<std::int64_t> offsets);

  [[nodiscard]] std::int64_t begin(int rank) const {
    return offsets_[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] std::int64_t length(int rank) const { return begin(rank + 1) - begin(rank); }
  [[nodiscard]] std::int64_t count() const { return offsets_.back(); }
  [[nodiscard]] std::int64_t longest() const;  // the length of the longest row
  [[nodiscard]] int size() const { return static_cast<int>(offsets_.size()) - 1; }
  [[nodiscard]] std::span<const std::int64_t> offsets() const { return offsets_; }
  // Every `by` neighbouring rows as one; `by` divides size().
  [[nodiscard]] RowCut joined(int by) const;
  // The `count` rows from `first` on, as a cut of their elements alone.
  [[nodiscard]] RowCut rows(int first, int count) const;

 private:
  std::vector<std::int64_t> offsets_;
};

}  // namespace hsdp
