// The body of the CUDA kernel that packs transposed gradients, including channels_last. It reads
// whole lines along the rows into shared memory and writes along the columns [Note: transposes].
// Internal to hsdp/kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_pack.h"
#include "hsdp/kernels/device_plan.h"
#include "hsdp/kernels/device_tile.h"

namespace hsdp::kernels {

template <int kElementBytes>
struct TileBody {
  static constexpr int kResident = 4;  // minimum blocks per multiprocessor
  static constexpr int kCellsAWord = 4 / kElementBytes;
  struct Shared {
    std::uint32_t words[kTileCells / kCellsAWord];
  };

  DevicePass pass;  // head: elements of the window before the first aligned one
  const char* gradient = nullptr;
  TransposePlan plan;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& shared) const {
    for (std::int64_t number = block.index(); number < plan.tile_count; number += block.count()) {
      const Tile tile = tile_of(plan, number, gradient, kElementBytes);
      const std::int64_t last = tile.position + (tile.rows - 1) * plan.row_distance + tile.columns;
      if (last <= 0 || tile.position >= pass.count) continue;
      block.each_thread([&](int thread) { read(tile, thread, shared); });
      block.each_thread([&](int thread) { write(tile, thread, shared); });
    }
  }

 private:
  HSDP_HOST_DEVICE static void put(Shared& shared, int cell, std::uint32_t bits) {
    if constexpr (kElementBytes == 4) {
      shared.words[cell] = bits;
    } else {
      auto* const halves = reinterpret_cast<AccessOf2*>(shared.words);
      halves[cell].half = static_cast<std::uint16_t>(bits);
    }
  }

  [[nodiscard]] HSDP_HOST_DEVICE float get(const Shared& shared, int cell) const {
    return load_element<kElementBytes>(reinterpret_cast<const char*>(shared.words) +
                                           static_cast<std::ptrdiff_t>(cell) * kElementBytes,
                                       pass.row_dtype);
  }

  // Reads eight rows of a column at a time.
  HSDP_HOST_DEVICE void read(const Tile& tile, int thread, Shared& shared) const {
    const int chunks = (tile.rows + kGroupElements - 1) / kGroupElements;
    for (int unit = thread; unit < chunks * tile.columns; unit += Block::kThreads) {
      const int column = unit / chunks;
      const int row = unit % chunks * kGroupElements;
      const int cell = column * plan.pitch + row;
      const char* const source =
          tile.source + (row * plan.row_stride + column * plan.column_stride) * kElementBytes;
      if (plan.row_stride == 1 && row + kGroupElements <= tile.rows) {
        const auto raw = load_raw<kElementBytes * kGroupElements>(source);
        // The pitch is even for two-byte cells, so that two cells make a word.
        HSDP_UNROLL
        for (int k = 0; k < kGroupElements / kCellsAWord; ++k) {
          auto* const words = reinterpret_cast<AccessOf4*>(shared.words);
          words[cell / kCellsAWord + k].words[0] = raw.words[k];
        }
        continue;
      }
      HSDP_UNROLL
      for (int k = 0; k < kGroupElements && row + k < tile.rows; ++k) {
        const char* const element = source + k * plan.row_stride * kElementBytes;
        if constexpr (kElementBytes == 4) {
          put(shared, cell + k, reinterpret_cast<const AccessOf4*>(element)->words[0]);
        } else {
          put(shared, cell + k, reinterpret_cast<const AccessOf2*>(element)->half);
        }
      }
    }
  }

  // Writes eight elements of a run at a time, aligned in the output.
  HSDP_HOST_DEVICE void write(const Tile& tile, int thread, const Shared& shared) const {
    const int runs = plan.one_run ? 1 : tile.rows;
    const int length = plan.one_run ? tile.rows * tile.columns : tile.columns;
    const int groups = (length + 2 * kGroupElements - 2) / kGroupElements;
    for (int unit = thread; unit < runs * groups; unit += Block::kThreads) {
      const int run = unit / groups;
      const std::int64_t position = tile.position + run * plan.row_distance;
      // `position` may be negative; the remainder must not be.
      const std::int64_t past = (position - pass.head) % kGroupElements;
      const auto shift = static_cast<int>((past + kGroupElements) % kGroupElements);
      const int first = unit % groups * kGroupElements - shift;
      const std::int64_t before = -position;  // elements of the run outside the window
      const std::int64_t end = pass.count - position < length ? pass.count - position : length;
      if (first >= end || first + kGroupElements <= before) continue;
      const int start = first < 0 ? 0 : first;
      int row = plan.one_run ? start / tile.columns : run;
      int column = plan.one_run ? start % tile.columns : start;
      Group group{};
      if (first >= 0 && first >= before && first + kGroupElements <= end &&
          column + kGroupElements <= tile.columns) {
        HSDP_UNROLL
        for (int k = 0; k < kGroupElements; ++k) {
          group.values[k] = get(shared, (column + k) * plan.pitch + row);
        }
        finish_group(pass, position + first, group);
        continue;
      }
      bool whole = true;
      HSDP_UNROLL
      for (int k = 0; k < kGroupElements; ++k) {
        const int at = first + k;
        if (at < 0) {
          whole = false;
          continue;
        }
        if (at < before || at >= end) {
          whole = false;
        } else {
          group.values[k] = get(shared, column * plan.pitch + row);
        }
        if (++column == tile.columns) {
          column = 0;
          ++row;
        }
      }
      if (whole) {
        finish_group(pass, position + first, group);
        continue;
      }
      HSDP_UNROLL
      for (int k = 0; k < kGroupElements; ++k) {
        const int at = first + k;
        if (at >= 0 && at >= before && at < end) {
          finish_element(pass, position + at, group.values[k]);
        }
      }
    }
  }
};

}  // namespace hsdp::kernels
