// The order of summation of a squared norm, shared by norm.cpp, its SIMD versions and CUDA.
// Internal to hsdp/kernels.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "hsdp/tensor_view.h"

namespace hsdp::kernels {

constexpr std::int64_t kNormLaneCount = 16;
constexpr std::int64_t kNormChunkElements = 1024;
using NormLanes = std::array<double, kNormLaneCount>;

// At least one: the sum of no elements is zero.
HSDP_HOST_DEVICE constexpr std::int64_t norm_chunks(std::int64_t count) {
  return count > 0 ? (count + kNormChunkElements - 1) / kNormChunkElements : 1;
}

HSDP_HOST_DEVICE inline double lane_total(double* lanes) {
  for (std::int64_t half = kNormLaneCount / 2; half > 0; half /= 2) {
    for (std::int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Sums what is pushed, chunk by chunk, then the sums of the chunks, and so on.
class NormTree {
 public:
  void push(double sum) { add(0, sum); }
  [[nodiscard]] double total();

 private:
  struct Level {
    NormLanes lanes{};
    std::int64_t count = 0;
  };
  void add(std::size_t level, double sum);
  void close(std::size_t level);

  std::array<Level, 6> levels_;  // an index cannot reach 1024^6 chunks
};

// sums[c] = the sum of the squares of chunk c of `values`, for every chunk, in the caller's
// floating-point environment. The square of an fp32 value is exact in fp64.
void sum_chunk_squares(ConstTensorView values, double* sums);
void sum_chunk_squares_scalar(ConstTensorView values, double* sums);
// Adds the squares of elements [begin, end) to lane i mod 16.
void add_squares_range(ConstTensorView values, std::int64_t begin, std::int64_t end,
                       NormLanes& lanes);

[[nodiscard]] bool find_nonfinite(ConstTensorView values);
[[nodiscard]] bool has_nonfinite_range(ConstTensorView values, std::int64_t begin);

}  // namespace hsdp::kernels
