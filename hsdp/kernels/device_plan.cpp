#include "hsdp/kernels/device_plan.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/kernels/strided_walk.h"

namespace hsdp::kernels {
namespace {

using Dimension = StridedWalk::Dimension;

constexpr int kTileSide = 64;
constexpr int kTileElements = kTileSide * kTileSide;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The innermost dimensions that contain the window, the outermost of them cut to it.
struct Window {
  std::vector<Dimension> dimensions;
  std::int64_t source = 0;  // in elements
  std::int64_t begin = 0;   // relative to the remaining dimensions
};

Window cut_to_window(const StridedView& view, std::int64_t begin, std::int64_t count) {
  Window window;
  window.dimensions = StridedWalk(view).dimensions();
  window.begin = begin;
  while (true) {
    Dimension& outermost = window.dimensions.front();
    const std::int64_t first = window.begin / outermost.distance;
    const std::int64_t last = (window.begin + count - 1) / outermost.distance;
    window.source += first * outermost.stride;
    window.begin -= first * outermost.distance;
    outermost.extent = last - first + 1;
    if (outermost.extent > 1 || window.dimensions.size() == 1) return window;
    window.dimensions.erase(window.dimensions.begin());
  }
}

// The dimension with the smallest stride, if that is not the innermost one.
std::size_t closest(const std::vector<Dimension>& dimensions) {
  std::size_t best = dimensions.size() - 1;
  for (std::size_t i = 0; i + 1 < dimensions.size(); ++i) {
    const std::int64_t stride = std::abs(dimensions[i].stride);
    if (stride != 0 && stride < std::abs(dimensions[best].stride)) best = i;
  }
  return best;
}

// Cells of a tile's column, padded so that no two columns use the same banks.
int pitch_of(int rows, int element_bytes) {
  if (element_bytes == 4) return rows | 1;
  return (((rows + 1) / 2) | 1) * 2;
}

// Takes as many rows as fill whole lines, and fills the tile with columns.
void choose_tile(TransposePlan& plan, int element_bytes) {
  const auto columns = static_cast<int>(std::min<std::int64_t>(plan.columns, kTileSide));
  auto rows = static_cast<int>(std::min<std::int64_t>(plan.rows, kTileElements / columns));
  if (rows > kTileSide && rows < plan.rows) rows -= rows % kTileSide;
  const int most_columns = kTileElements / pitch_of(rows, element_bytes);
  plan.tile_rows = rows;
  plan.tile_columns =
      static_cast<int>(std::min<std::int64_t>(plan.columns, std::max(columns, most_columns)));
  plan.pitch = pitch_of(rows, element_bytes);
  plan.one_run = plan.tile_columns == plan.columns && plan.row_distance == plan.columns;
  plan.tiles_down = ceil_div(plan.rows, plan.tile_rows);
  plan.tiles_across = ceil_div(plan.columns, plan.tile_columns);
  plan.tile_count *= plan.tiles_down * plan.tiles_across;
}

TransposePlan plan_tiles(const Window& window, std::size_t row, int element_bytes) {
  TransposePlan plan;
  const Dimension& rows = window.dimensions[row];
  const Dimension& columns = window.dimensions.back();
  plan.position = -window.begin;
  plan.rows = rows.extent;
  plan.columns = columns.extent;
  plan.row_stride = rows.stride;
  plan.column_stride = columns.stride;
  plan.row_distance = rows.distance;
  for (std::size_t i = 0; i + 1 < window.dimensions.size(); ++i) {
    if (i == row) continue;
    const Dimension& outer = window.dimensions[i];
    plan.outer[plan.outer_count++] = {outer.extent, outer.stride, outer.distance};
    plan.tile_count *= outer.extent;
  }
  choose_tile(plan, element_bytes);
  return plan;
}

}  // namespace

void require_alignment(const void* data, Dtype dtype) {
  const auto bytes = static_cast<std::uintptr_t>(gradient_bytes(dtype));
  if (reinterpret_cast<std::uintptr_t>(data) % bytes == 0) return;
  throw UsageError({.where = "kernels: " + std::string(name(dtype)) + " on a GPU",
                    .expected = "memory at a multiple of " + std::to_string(bytes) + " bytes",
                    .got = "memory that is not",
                    .remedy = "hand over a copy"});
}

void require_dimensions(std::size_t count) {
  if (count <= kMostDimensions) return;
  throw UsageError({.where = "cast_and_pack: on a GPU",
                    .expected = "at most " + std::to_string(kMostDimensions) +
                                " dimensions once those are merged that one stride covers",
                    .got = std::to_string(count),
                    .remedy = "hand over a contiguous copy"});
}

std::int64_t misaligned_bytes(const void* row, Dtype dtype, const void* aligned,
                              Dtype aligned_dtype, std::int64_t count) {
  if (row == nullptr) return 0;
  const std::int64_t head = elements_to_alignment(aligned, gradient_bytes(aligned_dtype), count);
  if (head == count) return 0;  // no whole group
  const auto first = reinterpret_cast<std::uintptr_t>(at_element(row, head, dtype));
  return first % kAccessBytes == 0 ? 0 : count * gradient_bytes(dtype);
}

DevicePass plan_pass(const RowPass& pass, std::atomic<std::uint32_t>* nonfinite) {
  if (pass.outs.empty() || pass.outs.size() > kMostOuts) {
    throw UsageError({.where = "kernels: on a GPU",
                      .expected = "1 to " + std::to_string(kMostOuts) + " outputs",
                      .got = std::to_string(pass.outs.size())});
  }
  for (const void* const row : pass.rows) require_alignment(row, pass.row_dtype);
  for (const void* const out : pass.outs) require_alignment(out, pass.out_dtype);
  require_alignment(pass.add, pass.add_dtype);
  DevicePass plan;
  plan.row_count = static_cast<int>(pass.rows.size());
  plan.row_dtype = pass.row_dtype;
  plan.wire_dtype = pass.wire_dtype;
  plan.send_scale = pass.send_scale;
  plan.add = pass.add;
  plan.add_dtype = pass.add_dtype;
  plan.steps = pass.steps;
  std::ranges::copy(pass.outs, plan.outs);
  plan.out_count = static_cast<int>(pass.outs.size());
  plan.out_dtype = pass.out_dtype;
  plan.count = pass.count;
  // Align the memory that moves the most bytes.
  plan.head = pass.rows.size() > 1
                  ? elements_to_alignment(pass.rows[0], gradient_bytes(pass.row_dtype), pass.count)
                  : elements_to_alignment(pass.outs[0], gradient_bytes(pass.out_dtype), pass.count);
  static_assert(sizeof(*nonfinite) == sizeof(std::uint32_t));
  plan.nonfinite = reinterpret_cast<std::uint32_t*>(nonfinite);
  return plan;
}

PackPlan plan_pack(const CastAndPack& args) {
  const StridedView& view = *args.gradient;
  const int element_bytes = gradient_bytes(view.dtype);
  require_alignment(view.data, view.dtype);
  const Window window = cut_to_window(view, args.begin, args.count);
  require_dimensions(window.dimensions.size());
  RowPass pass;
  pass.add = args.add;
  pass.add_dtype = args.add_dtype;
  pass.steps.result_scale = power_of_two(-args.exponent);
  pass.outs = std::span(&args.out, 1);
  pass.out_dtype = args.out_dtype;
  pass.count = args.count;
  PackPlan plan;
  plan.pass = plan_pass(pass, nullptr);
  plan.pass.row_dtype = view.dtype;
  require_alignment(args.base, sum_dtype(args.out_dtype));
  plan.pass.base = args.base;
  plan.gradient = static_cast<const char*>(view.data) + window.source * element_bytes;
  const std::size_t row = closest(window.dimensions);
  plan.tiled = row + 1 < window.dimensions.size() && view.dtype != Dtype::kF64;
  if (plan.tiled) {
    plan.tiles = plan_tiles(window, row, element_bytes);
    return plan;
  }
  plan.gather.begin = window.begin;
  plan.gather.dimension_count = 0;
  for (const Dimension& dimension : window.dimensions) {
    plan.gather.dimensions[plan.gather.dimension_count++] = {dimension.extent, dimension.stride,
                                                             dimension.distance};
  }
  return plan;
}

bool lie_evenly(std::span<const void* const> rows) {
  const EvenRows even = even_rows(rows);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (even.at(static_cast<int>(r)) != rows[r]) return false;
  }
  return true;
}

EvenRows even_rows(std::span<const void* const> rows) {
  EvenRows even;
  if (rows.empty()) return even;
  even.first = static_cast<const char*>(rows[0]);
  // Subtract as integers: the rows may lie in different allocations.
  if (rows.size() > 1) {
    even.distance = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(rows[1]) -
                                              reinterpret_cast<std::uintptr_t>(rows[0]));
  }
  return even;
}

ListedRows listed_rows(std::span<const void* const> rows) {
  if (rows.size() > kMostListedRows) {
    throw UsageError(
        {.where = "kernels: on a GPU",
         .expected = "at most " + std::to_string(kMostListedRows) + " rows at unequal distances",
         .got = std::to_string(rows.size()),
         .remedy = "lay them out at equal distances"});
  }
  ListedRows listed{};
  std::ranges::copy(rows, listed.rows);
  return listed;
}

}  // namespace hsdp::kernels
