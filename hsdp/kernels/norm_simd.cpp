#include <cstddef>
#include <cstdint>

// First of the Highway headers.
#include "hsdp/kernels/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hsdp/kernels/norm_simd.cpp"
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on
#include <hwy/cache_control.h>

#include "hsdp/kernels/norm_lanes.h"
#include "hsdp/kernels/simd_dispatch.h"
#include "hsdp/kernels/vector_codec.h"

HWY_BEFORE_NAMESPACE();
namespace hsdp::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

void sum_chunk_squares_simd(ConstTensorView values, double* sums) {
  sum_chunk_squares_scalar(values, sums);
}

bool find_nonfinite_simd(ConstTensorView values) { return has_nonfinite_range(values, 0); }

#else

constexpr std::size_t kAheadBytes = 1024;  // prefetch distance

using DD = hn::ScalableTag<double>;
using VD = hn::Vec<DD>;
using DHalfF = hn::Half<DF>;  // as many fp32 lanes as DD

// lane_total() of the lanes in kCount vectors.
template <std::size_t kCount>
double total_of(VD* all) {
  for (std::size_t half = kCount / 2; half > 0; half /= 2) {
    for (std::size_t k = 0; k < half; ++k) all[k] = hn::Add(all[k], all[k + half]);
  }
  double lanes[kNormLaneCount / kCount];
  hn::StoreU(all[0], DD(), lanes);
  for (std::size_t half = kNormLaneCount / kCount / 2; half > 0; half /= 2) {
    for (std::size_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  }
  return lanes[0];
}

// Sums one chunk.
template <class Load>
double sum_squares_loop(ConstTensorView values) {
  constexpr std::size_t kLanes = hn::MaxLanes(DF());
  constexpr std::size_t kVectors = kNormLaneCount / kLanes;  // fp32 vectors that fill 16 lanes
  const DD dd;
  const std::size_t half = kLanes / 2;
  VD low[kVectors];
  VD high[kVectors];
  for (std::size_t k = 0; k < kVectors; ++k) low[k] = high[k] = hn::Zero(dd);
  const auto end = static_cast<std::size_t>(values.count);
  std::size_t i = 0;
  for (; i + kNormLaneCount <= end; i += kNormLaneCount) {
    hwy::Prefetch(static_cast<const char*>(values.data) + i * Load::kElementBytes + kAheadBytes);
    for (std::size_t k = 0; k < kVectors; ++k) {
      const VF v = Load::load(values.data, i + k * kLanes, hn::Zero(DF()));
      const VD a = hn::PromoteTo(dd, hn::LowerHalf(DHalfF(), v));
      const VD b = hn::PromoteTo(dd, hn::UpperHalf(DHalfF(), v));
      low[k] = hn::Add(low[k], hn::Mul(a, a));
      high[k] = hn::Add(high[k], hn::Mul(b, b));
    }
  }
  VD all[2 * kVectors];  // in the order of the lanes
  for (std::size_t k = 0; k < kVectors; ++k) {
    all[2 * k] = low[k];
    all[2 * k + 1] = high[k];
  }
  if (i == end) return total_of<2 * kVectors>(all);
  NormLanes lanes;
  for (std::size_t k = 0; k < 2 * kVectors; ++k) hn::StoreU(all[k], dd, lanes.data() + k * half);
  add_squares_range(values, static_cast<std::int64_t>(i), values.count, lanes);
  return lane_total(lanes.data());
}

template <class Load>
void sum_chunks_loop(ConstTensorView values, double* sums) {
  for (std::int64_t begin = 0; begin < values.count; begin += kNormChunkElements) {
    const std::int64_t left = values.count - begin;
    *sums++ = sum_squares_loop<Load>(
        values.slice(begin, left < kNormChunkElements ? left : kNormChunkElements));
  }
}

void sum_chunk_squares_simd(ConstTensorView values, double* sums) {
  if (values.dtype == Dtype::kBf16) {
    sum_chunks_loop<LoadBf16>(values, sums);
  } else if (values.dtype == Dtype::kF16) {
    sum_chunks_loop<LoadF16>(values, sums);
  } else {
    sum_chunks_loop<LoadF32>(values, sums);
  }
}

// Tracks the largest magnitude as an integer, and tests it once per piece.
template <class T>
bool find_nonfinite_loop(ConstTensorView values, T magnitude_mask, T infinity) {
  const hn::ScalableTag<T> d;
  constexpr std::size_t kPiece = 16384;
  const std::size_t lanes = hn::Lanes(d);
  const T* const data = static_cast<const T*>(values.data);
  const auto end = static_cast<std::size_t>(values.count);
  const auto mask = hn::Set(d, magnitude_mask);
  std::size_t i = 0;
  while (i + 4 * lanes <= end) {
    const std::size_t piece_end = i + kPiece < end ? i + kPiece : end;
    auto a = hn::Zero(d);
    auto b = hn::Zero(d);
    for (; i + 4 * lanes <= piece_end; i += 4 * lanes) {
      const char* const ahead = reinterpret_cast<const char*>(data + i) + kAheadBytes;
      for (std::size_t byte = 0; byte < 4 * lanes * sizeof(T); byte += 64) {
        hwy::Prefetch(ahead + byte);
      }
      a = hn::Max(a, hn::And(hn::LoadU(d, data + i), mask));
      b = hn::Max(b, hn::And(hn::LoadU(d, data + i + lanes), mask));
      a = hn::Max(a, hn::And(hn::LoadU(d, data + i + 2 * lanes), mask));
      b = hn::Max(b, hn::And(hn::LoadU(d, data + i + 3 * lanes), mask));
    }
    const auto finite = hn::Lt(hn::Max(a, b), hn::Set(d, infinity));
    if (!hn::AllTrue(d, finite)) return true;
  }
  return has_nonfinite_range(values, static_cast<std::int64_t>(i));
}

bool find_nonfinite_simd(ConstTensorView values) {
  if (values.dtype == Dtype::kBf16)
    return find_nonfinite_loop<std::int16_t>(values, 0x7fff, 0x7f80);
  if (values.dtype == Dtype::kF16) return find_nonfinite_loop<std::int16_t>(values, 0x7fff, 0x7c00);
  return find_nonfinite_loop<std::int32_t>(values, 0x7fffffff, 0x7f800000);
}

#endif  // a target with vectors

}  // namespace HWY_NAMESPACE
}  // namespace hsdp::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace hsdp::kernels {

HWY_EXPORT(sum_chunk_squares_simd);
HWY_EXPORT(find_nonfinite_simd);

void sum_chunk_squares(ConstTensorView values, double* sums) {
  if (simd_choice().scalar || values.dtype == Dtype::kF64) {
    sum_chunk_squares_scalar(values, sums);
  } else {
    HSDP_SIMD_DISPATCH(sum_chunk_squares_simd)(values, sums);
  }
}

bool find_nonfinite(ConstTensorView values) {
  if (simd_choice().scalar || values.dtype == Dtype::kF64) return has_nonfinite_range(values, 0);
  return HSDP_SIMD_DISPATCH(find_nonfinite_simd)(values);
}

}  // namespace hsdp::kernels

#endif  // HWY_ONCE
