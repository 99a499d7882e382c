// Which elements one tile of a TransposePlan covers. Internal to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/kernels/device_pack.h"
#include "hsdp/kernels/device_plan.h"

namespace hsdp::kernels {

struct Tile {
  const char* source;
  std::int64_t position;  // in the window
  int rows;
  int columns;
};

HSDP_HOST_DEVICE inline Tile tile_of(const TransposePlan& plan, std::int64_t number,
                                     const char* gradient, int element_bytes) {
  const Division across(number, plan.tiles_across);
  const Division down(across.quotient, plan.tiles_down);
  const std::int64_t r = down.remainder * plan.tile_rows;
  const std::int64_t c = across.remainder * plan.tile_columns;
  std::int64_t offset = r * plan.row_stride + c * plan.column_stride;
  std::int64_t position = plan.position + r * plan.row_distance + c;
  std::int64_t index = down.quotient;
  for (int d = plan.outer_count - 1; d >= 0; --d) {
    const Division at(index, plan.outer[d].extent);
    offset += at.remainder * plan.outer[d].stride;
    position += at.remainder * plan.outer[d].distance;
    index = at.quotient;
  }
  const std::int64_t rows = plan.rows - r;
  const std::int64_t columns = plan.columns - c;
  return {gradient + offset * element_bytes, position,
          rows < plan.tile_rows ? static_cast<int>(rows) : plan.tile_rows,
          columns < plan.tile_columns ? static_cast<int>(columns) : plan.tile_columns};
}

}  // namespace hsdp::kernels
