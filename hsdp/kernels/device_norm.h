// The body of the CUDA kernel for the squared norm, in the order of norm.h. Internal to
// hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_group.h"
#include "hsdp/kernels/device_list.h"
#include "hsdp/kernels/norm_lanes.h"

namespace hsdp::kernels {

// What a thread accesses at once: elements of one row of 16 lanes.
template <int kElementBytes>
struct LanePart {
  static constexpr int kLanes = 16 / kElementBytes;
  static constexpr int kThreadsAChunk = static_cast<int>(kNormLaneCount) / kLanes;
};

struct NormItem {
  const char* values = nullptr;
  double* sums = nullptr;  // one per chunk
  std::int64_t count = 0;
  std::uint32_t first_unit = 0;
};

constexpr int kMostNormItems = 120;  // keeps all arguments of a kernel within 4 KiB

// For each item, sums[c] = the sum of chunk c: the squares of gradient elements, or plain fp64
// sums, whose dtype is kF64 and which have no `squares`.
template <int kElementBytes>
struct ChunkSumBody {
  static constexpr int kResident = 2;  // minimum blocks per multiprocessor
  using Part = LanePart<kElementBytes>;
  static constexpr int kChunks = Block::kThreads / Part::kThreadsAChunk;  // of a block at once
  static constexpr int kPitch = static_cast<int>(kNormLaneCount) + 1;     // avoids bank conflicts
  // Sums of sums keep few threads busy, and these mostly wait for memory.
  static constexpr int kAtOnce = kElementBytes == 8 ? 16 : 8;
  static constexpr int kRows = static_cast<int>(kNormChunkElements / kNormLaneCount);
  struct Shared {
    double lanes[kChunks * kPitch];
  };

  Dtype dtype = Dtype::kF32;
  bool squares = true;
  int item_count = 0;
  std::uint32_t unit_count = 0;  // a unit is kChunks chunks
  NormItem items[kMostNormItems];

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& shared) const {
    for (std::int64_t unit = block.index(); unit < unit_count; unit += block.count()) {
      const NormItem& item = item_of(items, item_count, static_cast<std::uint32_t>(unit));
      const std::int64_t chunks = norm_chunks(item.count);
      const std::int64_t first = (unit - item.first_unit) * kChunks;
      block.each_thread([&](int thread) {
        const std::int64_t chunk = first + thread / Part::kThreadsAChunk;
        const int lane = thread % Part::kThreadsAChunk * Part::kLanes;
        double* const lanes = shared.lanes + thread / Part::kThreadsAChunk * kPitch + lane;
        if (chunk < chunks) sum_lanes(item, chunk * kNormChunkElements + lane, lanes);
      });
      block.each_thread([&](int thread) {
        if (thread < kChunks && first + thread < chunks) {
          item.sums[first + thread] = lane_total(shared.lanes + thread * kPitch);
        }
      });
    }
  }

 private:
  using Raw = RawBytes<16>;

  [[nodiscard]] HSDP_HOST_DEVICE double squared(double value) const {
    return squares ? value * value : value;
  }

  [[nodiscard]] HSDP_HOST_DEVICE double term(const Raw& raw, int lane) const {
    if constexpr (kElementBytes == 8) {
      const int low = 2 * lane;
      const std::uint64_t bits =
          static_cast<std::uint64_t>(raw.words[low + 1]) << 32 | raw.words[low];
      return squared(std::bit_cast<double>(bits));
    } else {
      const double value = decode_bits(bits_in<kElementBytes>(raw.words, lane), dtype);
      return value * value;
    }
  }

  // Sums the lanes from `begin` on, over the rows of its chunk.
  HSDP_HOST_DEVICE void sum_lanes(const NormItem& item, std::int64_t begin, double* lanes) const {
    double total[Part::kLanes] = {};
    const std::int64_t left = item.count - begin;  // row k is whole when k * 16 + kLanes <= left
    const std::int64_t whole = left < Part::kLanes ? 0 : (left - Part::kLanes) / kNormLaneCount + 1;
    const int rows = whole < kRows ? static_cast<int>(whole) : kRows;
    const char* const source = item.values + begin * kElementBytes;
    for (int first = 0; first < rows; first += kAtOnce) {
      Raw raw[kAtOnce];
      HSDP_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k < rows) {
          raw[k] = load_raw<16>(source + (first + k) * kNormLaneCount * kElementBytes);
        }
      }
      HSDP_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k >= rows) break;
        HSDP_UNROLL
        for (int lane = 0; lane < Part::kLanes; ++lane) total[lane] += term(raw[k], lane);
      }
    }
    if (rows < kRows) add_rest(item, begin + rows * kNormLaneCount, total);
    HSDP_UNROLL
    for (int lane = 0; lane < Part::kLanes; ++lane) lanes[lane] = total[lane];
  }

  // Adds the row at `begin`, which the end of the values cuts short.
  HSDP_HOST_DEVICE void add_rest(const NormItem& item, std::int64_t begin, double* total) const {
    HSDP_UNROLL
    for (int lane = 0; lane < Part::kLanes; ++lane) {
      if (begin + lane >= item.count) break;
      if constexpr (kElementBytes == 8) {
        total[lane] += squared(reinterpret_cast<const double*>(item.values)[begin + lane]);
      } else {
        const double value = decode(item.values, begin + lane, dtype);
        total[lane] += value * value;
      }
    }
  }
};

}  // namespace hsdp::kernels
