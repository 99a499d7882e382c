// Cuts a message into equal tiles that fit a buffer. Each tile has a window of every rank's slice,
// in proportion to the slice's length. A value, the same on every rank of a call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hsdp/comm/host/reduce_plan.h"

namespace hsdp::comm {

class TilePlan {
 public:
  struct Window {
    std::int64_t begin = 0;  // element of the whole message
    std::int64_t count = 0;
    std::size_t offset = 0;  // byte in the tile, aligned to a cache line
  };

  // The largest tile in a group of `size` ranks.
  [[nodiscard]] static std::size_t tile_bytes(int size);

  // `slices` by rank; `element_bytes` of the elements in a tile.
  TilePlan(std::vector<ElementRun> slices, std::size_t element_bytes);

  [[nodiscard]] std::int64_t tiles() const { return tiles_; }
  // Empty if the rank's slice ends before this tile.
  [[nodiscard]] Window window(int rank, std::int64_t tile) const;

 private:
  struct Column {
    std::int64_t length = 0;
    std::size_t offset = 0;
  };

  std::vector<ElementRun> slices_;
  std::vector<Column> columns_;  // a rank's place in every tile
  std::int64_t tiles_ = 0;
};

}  // namespace hsdp::comm
