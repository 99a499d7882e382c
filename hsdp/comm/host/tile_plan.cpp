#include "hsdp/comm/host/tile_plan.h"

#include <algorithm>
#include <utility>

#include "hsdp/comm/host/page.h"

namespace hsdp::comm {
namespace {

// Two buffers each of a few ranks on one core fit its second-level cache, beside the data itself.
constexpr std::size_t kSmallestTileBytes = std::size_t{128} << 10;
constexpr std::int64_t kBlock = 32;  // elements: whole cache lines for any dtype
constexpr std::size_t kWidestElementBytes = 8;

std::int64_t divide_up(std::int64_t dividend, std::int64_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

// Many ranks share a core, and no cache holds what they all stage: then fewer meetings matter more,
// and so do copies of whole pages.
std::size_t content_bytes(std::size_t ranks) {
  return std::max(kSmallestTileBytes, ranks * kPageBytes);
}

}  // namespace

// Windows are whole blocks: each rank may take up to one more than an even share.
std::size_t TilePlan::tile_bytes(int size) {
  return content_bytes(static_cast<std::size_t>(size)) +
         static_cast<std::size_t>(size * kBlock) * kWidestElementBytes;
}

TilePlan::TilePlan(std::vector<ElementRun> slices, std::size_t element_bytes)
    : slices_(std::move(slices)), columns_(slices_.size()) {
  std::int64_t elements = 0;
  for (const ElementRun& slice : slices_) elements += slice.length;
  if (elements == 0) return;
  const std::size_t tile_elements = content_bytes(slices_.size()) / element_bytes;
  tiles_ = divide_up(elements, static_cast<std::int64_t>(tile_elements));
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
