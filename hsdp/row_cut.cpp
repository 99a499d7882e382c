#include "hsdp/row_cut.h"

#include <algorithm>
#include <string>
#include <utility>

#include "hsdp/error.h"

namespace hsdp {

RowCut::RowCut(std::int64_t count, int size) {
  if (count < 0 || size < 1) {
    throw UsageError({.where = "row cut",
                      .expected = "a count of at least 0 over at least 1 rank",
                      .got = std::to_string(count) + " over " + std::to_string(size)});
  }
  const std::int64_t row = count / size + (count % size != 0 ? 1 : 0);
  offsets_.reserve(static_cast<std::size_t>(size) + 1);
  std::int64_t offset = 0;
  for (int r = 0; r <= size; ++r) {
    offsets_.push_back(offset);
    offset += std::min(row, count - offset);
  }
}

RowCut::RowCut(std::vector<std::int64_t> offsets) : offsets_(std::move(offsets)) {
  if (offsets_.size() < 2 || offsets_.front() != 0 || !std::ranges::is_sorted(offsets_)) {
    throw UsageError({.where = "row cut",
                      .expected = "two offsets or more in ascending order, the first 0",
                      .got = std::to_string(offsets_.size()) + " that are not"});
  }
}

std::int64_t RowCut::longest() const {
  std::int64_t longest = 0;
  for (int r = 0; r < size(); ++r) longest = std::max(longest, length(r));
  return longest;
}

RowCut RowCut::joined(int by) const {
  if (by == 1) return *this;
  std::vector<std::int64_t> offsets;
  for (int r = 0; r <= size(); r += by) offsets.push_back(begin(r));
  return RowCut(std::move(offsets));
}

RowCut RowCut::rows(int first, int count) const {
  std::vector<std::int64_t> offsets;
  for (int r = first; r <= first + count; ++r) offsets.push_back(begin(r) - begin(first));
  return RowCut(std::move(offsets));
}

}  // namespace hsdp
