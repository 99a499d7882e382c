#include "hsdp/comm/host/tile_plan.h"

#include <algorithm>
#include <utility>

namespace hsdp::comm {
namespace {

// Two buffers of a few ranks on one core fit its second cache, with room for the data's own lines.
constexpr std::size_t kTileBytes = std::size_t{128} << 10;
constexpr std::int64_t kBlock = 32;  // elements: whole cache lines of any dtype
constexpr std::size_t kWidestElementBytes = 8;

std::int64_t divide_up(std::int64_t dividend, std::int64_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

}  // namespace

// Windows are whole blocks: up to one for each rank more than an even share.
std::size_t TilePlan::tile_bytes(int size) {
  return kTileBytes + static_cast<std::size_t>(size * kBlock) * kWidestElementBytes;
}

TilePlan::TilePlan(std::vector<Slice> slices, std::size_t element_bytes)
    : slices_(std::move(slices)), columns_(slices_.size()) {
  std::int64_t elements = 0;
  for (const Slice& slice : slices_) elements += slice.length;
  if (elements == 0) return;
  tiles_ = divide_up(elements, static_cast<std::int64_t>(kTileBytes / element_bytes));
  std::size_t offset = 0;
  for (std::size_t r = 0; r < slices_.size(); ++r) {
    const std::int64_t length = divide_up(divide_up(slices_[r].length, tiles_), kBlock) * kBlock;
    columns_[r] = {length, offset};
    offset += static_cast<std::size_t>(length) * element_bytes;
  }
}

TilePlan::Window TilePlan::window(int rank, std::int64_t tile) const {
  const auto r = static_cast<std::size_t>(rank);
  const std::int64_t skip = std::min(slices_[r].length, tile * columns_[r].length);
  return {slices_[r].begin + skip, std::min(columns_[r].length, slices_[r].length - skip),
          columns_[r].offset};
}

}  // namespace hsdp::comm
