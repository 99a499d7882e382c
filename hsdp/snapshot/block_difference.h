// Error measures over a run of elements, at memory speed, with the host's best SIMD target.
#pragma once

#include <cstddef>

namespace hsdp {

// The spacing of a floating-point type at x is 2^(max(exponent(x), min_exponent) - mantissa_bits).
struct UlpSpacing {
  int mantissa_bits = 23;
  int min_exponent = -126;
};

// All in fp64. A NaN, an infinity or a square beyond fp64 makes one of the three sums of squares
// non-finite; then no other field is meaningful.
struct BlockDifference {
  double max_difference = 0;
  double max_a = 0;
  double max_b = 0;
  double max_ulp = 0;  // in ulps of the larger magnitude of each pair
  double sum_squared_difference = 0;
  double sum_squared_a = 0;
  double sum_squared_b = 0;
  double sum_product = 0;
};

[[nodiscard]] BlockDifference block_difference(const float* a, const float* b, std::size_t count,
                                               UlpSpacing spacing);
[[nodiscard]] BlockDifference block_difference(const double* a, const double* b, std::size_t count,
                                               UlpSpacing spacing);

}  // namespace hsdp
