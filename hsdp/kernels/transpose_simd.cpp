#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

// First of the Highway headers.
#include "hsdp/kernels/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hsdp/kernels/transpose_simd.cpp"
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include "hsdp/kernels/simd_dispatch.h"
#include "hsdp/kernels/transpose.h"

#ifndef HSDP_KERNELS_GATHER_EACH_
#define HSDP_KERNELS_GATHER_EACH_
namespace hsdp::kernels {
namespace {

struct BlockRange {
  std::int64_t row_begin, row_end, column_begin, column_end;
};

template <class T>
void gather_each(const StridedBlock& block, const BlockRange& range, std::byte* out) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t r = range.row_begin; r < range.row_end; ++r) {
    const std::byte* source =
        block.data + (r * block.row_stride + range.column_begin * block.column_stride) * kBytes;
    std::byte* target = out + (r * block.out_stride + range.column_begin) * kBytes;
    for (std::int64_t c = range.column_begin; c < range.column_end; ++c) {
      std::memcpy(target, source, sizeof(T));
      source += block.column_stride * kBytes;
      target += kBytes;
    }
  }
}

}  // namespace
}  // namespace hsdp::kernels
#endif  // HSDP_KERNELS_GATHER_EACH_

HWY_BEFORE_NAMESPACE();
namespace hsdp::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

template <class T>
void transpose_blocks(const StridedBlock& block, std::byte* out) {
  gather_each<T>(block, {0, block.rows, 0, block.columns}, out);
}

#else

namespace hn = hwy::HWY_NAMESPACE;

constexpr std::int64_t kPrefetchColumns = 16;

// Rows contiguous in the source: transposes square tiles, one 128-bit vector a side, in registers.
template <class T>
void transpose_blocks(const StridedBlock& block, std::byte* out) {
  constexpr std::int64_t kSide = 16 / sizeof(T);
  const hn::FixedTag<T, kSide> d;
  const T* const source = reinterpret_cast<const T*>(block.data);
  T* const target = reinterpret_cast<T*>(out);
  const std::int64_t rows = block.rows / kSide * kSide;
  const std::int64_t columns = block.columns / kSide * kSide;
  const std::int64_t row_bytes = block.rows * static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t c = 0; c < columns; c += kSide) {
    // The columns are far apart, where the hardware does not prefetch.
    for (std::int64_t k = c + kPrefetchColumns; k < std::min(c + kPrefetchColumns + kSide, columns);
         ++k) {
      const char* const column = reinterpret_cast<const char*>(source + k * block.column_stride);
      for (std::int64_t byte = 0; byte < row_bytes; byte += 64) {
        __builtin_prefetch(column + byte, 0, 2);
      }
    }
    for (std::int64_t r = 0; r < rows; r += kSide) {
      hn::Vec<decltype(d)> v[kSide];
      hn::Vec<decltype(d)> w[kSide];
      for (int k = 0; k < kSide; ++k) {
        v[k] = hn::LoadU(d, source + r + (c + k) * block.column_stride);
      }
      // Each round interleaves the first half of the vectors with the second.
      for (int round = 1; round < kSide; round *= 2) {
        for (int k = 0; k < kSide / 2; ++k) {
          w[2 * k] = hn::InterleaveLower(d, v[k], v[k + kSide / 2]);
          w[2 * k + 1] = hn::InterleaveUpper(d, v[k], v[k + kSide / 2]);
        }
        for (int k = 0; k < kSide; ++k) v[k] = w[k];
      }
      for (int k = 0; k < kSide; ++k) hn::StoreU(v[k], d, target + (r + k) * block.out_stride + c);
    }
  }
  gather_each<T>(block, {0, rows, columns, block.columns}, out);
  gather_each<T>(block, {rows, block.rows, 0, block.columns}, out);
}

#endif  // a target with vectors

void transpose_simd(const StridedBlock& block, std::byte* out) {
  if (block.element_bytes == 4) {
    transpose_blocks<std::uint32_t>(block, out);
  } else {
    transpose_blocks<std::uint16_t>(block, out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace hsdp::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace hsdp::kernels {

HWY_EXPORT(transpose_simd);

void gather(const StridedBlock& block, std::byte* out) {
  if (block.column_stride == 1) {
    const auto bytes = static_cast<std::int64_t>(block.element_bytes);
    for (std::int64_t r = 0; r < block.rows; ++r) {
      std::memcpy(out + r * block.out_stride * bytes, block.data + r * block.row_stride * bytes,
                  static_cast<std::size_t>(block.columns * bytes));
    }
  } else if (block.element_bytes == 8) {
    gather_each<std::uint64_t>(block, {0, block.rows, 0, block.columns}, out);
  } else if (block.row_stride == 1 && !simd_choice().scalar) {
    HSDP_SIMD_DISPATCH(transpose_simd)(block, out);
  } else if (block.element_bytes == 4) {
    gather_each<std::uint32_t>(block, {0, block.rows, 0, block.columns}, out);
  } else {
    gather_each<std::uint16_t>(block, {0, block.rows, 0, block.columns}, out);
  }
}

}  // namespace hsdp::kernels

#endif  // HWY_ONCE
