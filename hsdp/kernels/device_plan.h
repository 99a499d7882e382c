// How the CUDA kernels cut their work, decided on the host. Internal to hsdp/kernels.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/kernels/device_pass.h"
#include "hsdp/kernels/row_pass.h"

namespace hsdp::kernels {

constexpr int kMostDimensions = 12;

struct StridedDimension {
  std::int64_t extent = 1;
  std::int64_t stride = 1;
  std::int64_t distance = 1;  // in logical order, from one index to the next
};

struct GatherPlan {
  std::int64_t begin = 0;  // start of the window, in logical order
  StridedDimension dimensions[kMostDimensions]{};
  int dimension_count = 1;
};

constexpr int kTileCells = 4352;  // 64 x 64, plus padding for 64 columns

// Element (r, c) of a box lies at gradient + r * row_stride + c * column_stride, and is element
// position + r * row_distance + c of the window. Boxes repeat over the outer dimensions.
struct TransposePlan {
  std::int64_t position = 0;  // of the first box; negative when the box begins before the window
  std::int64_t rows = 1;
  std::int64_t columns = 1;
  std::int64_t row_stride = 1;
  std::int64_t column_stride = 1;
  std::int64_t row_distance = 1;
  StridedDimension outer[kMostDimensions];
  int outer_count = 0;
  int tile_rows = 1;
  int tile_columns = 1;
  int pitch = 1;         // cells from one column of a tile to the next
  bool one_run = false;  // the rows of a tile follow one another in the output
  std::int64_t tiles_down = 1;
  std::int64_t tiles_across = 1;
  std::int64_t tile_count = 1;
};

// The plan for a non-contiguous gradient.
struct PackPlan {
  DevicePass pass;                 // without rows
  const char* gradient = nullptr;  // the first element of `tiles` or `gather`
  bool tiled = false;
  TransposePlan tiles;
  GatherPlan gather;
};

// Throws UsageError if the gradient has more dimensions than a kernel takes.
[[nodiscard]] PackPlan plan_pack(const CastAndPack& args);

// Leaves out the rows. Throws UsageError if there are more outputs than a kernel takes.
[[nodiscard]] DevicePass plan_pass(const RowPass& pass, std::atomic<std::uint32_t>* nonfinite);

// Throws UsageError unless `data` is aligned to its elements, which kernels access whole.
void require_alignment(const void* data, Dtype dtype);

// Throws UsageError if a kernel cannot take `count` dimensions.
void require_dimensions(std::size_t count);

// Bytes of `row` that are read in accesses of less than kAccessBytes: groups begin where elements
// of `aligned` are aligned.
[[nodiscard]] std::int64_t misaligned_bytes(const void* row, Dtype dtype, const void* aligned,
                                            Dtype aligned_dtype, std::int64_t count);

// The rows as kernel arguments. listed_rows() throws UsageError for too many rows.
[[nodiscard]] bool lie_evenly(std::span<const void* const> rows);
[[nodiscard]] EvenRows even_rows(std::span<const void* const> rows);
[[nodiscard]] ListedRows listed_rows(std::span<const void* const> rows);

}  // namespace hsdp::kernels
