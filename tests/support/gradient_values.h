// Reproducible gradients, and memory from which they are handed to a Reducer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "hsdp/tensor_view.h"
#include "tests/support/numeric_reference.h"

namespace hsdp::test {

// The kinds of values that a gradient may have.
inline constexpr std::array<Dtype, 3> kDtypes{Dtype::kF32, Dtype::kBf16, Dtype::kF16};

// A small generator, as those of the standard library differ between implementations.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  [[nodiscard]] std::uint64_t next();
  // Uniform in [low, high].
  [[nodiscard]] int integer(int low, int high);
  [[nodiscard]] double uniform();  // [0, 1)
  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[next() % i]);
  }

 private:
  std::uint64_t state_;
};

[[nodiscard]] Values integer_values(std::int64_t count, int low, int high, std::uint64_t seed);
// Magnitudes from 2^low to below 2^(high + 1).
struct ExponentRange {
  int low = -12;
  int high = 11;
};
// Both signs, some zeros of either sign; rounded to `dtype`, so exact in it.
[[nodiscard]] Values random_values(std::int64_t count, Dtype dtype, std::uint64_t seed,
                                   ExponentRange exponents = {});

// One gradient in memory of its dtype, laid out by `axis_order`, outermost axis first. Empty:
// row-major.
class StoredGradient {
 public:
  StoredGradient(const Values& values, const Shape& shape, Dtype dtype,
                 const std::vector<int>& axis_order = {});
  [[nodiscard]] StridedView view() const;
  // Overwrites the memory with NaN, so that a later read shows.
  void poison();

 private:
  std::vector<std::byte> memory_;
  Shape shape_;
  Shape strides_;
  Dtype dtype_;
};

// fp32 -> memory of `dtype` and back. The values must be exact in it.
[[nodiscard]] std::vector<std::byte> encoded(const Values& values, Dtype dtype);
[[nodiscard]] Values decoded(const std::vector<std::byte>& memory, Dtype dtype);

}  // namespace hsdp::test
