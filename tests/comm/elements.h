// Element access by dtype, and the arithmetic of the reductions implemented a second time, naively.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "hsdp/comm/communicator.h"

namespace hsdp::test {

inline double get(ConstTensorView view, std::int64_t i) {
  const auto* const at = static_cast<const std::byte*>(view.data) +
                         static_cast<std::size_t>(i) * size_bytes(view.dtype);
  const auto load = [at]<typename T>(T value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (view.dtype) {
    case Dtype::kF32:
      return load(0.0F);
    case Dtype::kBf16:
      return to_float(load(Bf16{}));
    case Dtype::kF16:
      return to_float(load(F16{}));
    case Dtype::kF64:
      return load(0.0);
    case Dtype::kI64:
      return static_cast<double>(load(std::int64_t{0}));
    case Dtype::kU8:
      return load(std::uint8_t{0});
  }
  return 0.0;
}

inline void set(TensorView view, std::int64_t i, double value) {
  auto* const at =
      static_cast<std::byte*>(view.data) + static_cast<std::size_t>(i) * size_bytes(view.dtype);
  const auto store = [at](auto stored) { std::memcpy(at, &stored, sizeof stored); };
  switch (view.dtype) {
    case Dtype::kF32:
      return store(static_cast<float>(value));
    case Dtype::kBf16:
      return store(to_bf16(static_cast<float>(value)));
    case Dtype::kF16:
      return store(to_f16(static_cast<float>(value)));
    case Dtype::kF64:
      return store(value);
    case Dtype::kI64:
      return store(static_cast<std::int64_t>(value));
    case Dtype::kU8:
      return store(static_cast<std::uint8_t>(value));
  }
}

template <typename Value>
void fill(TensorView view, Value value_of) {
  for (std::int64_t i = 0; i < view.count; ++i) set(view, i, static_cast<double>(value_of(i)));
}

template <typename Value>
void expect_elements(ConstTensorView view, Value value_of) {
  for (std::int64_t i = 0; i < view.count; ++i) {
    ASSERT_EQ(get(view, i), value_of(i)) << "element " << i << " of " << to_string(view);
  }
}

// Even rows; rows of which one rank has all; rows of zero, one, most and few elements.
inline std::vector<RowCut> row_cuts(std::int64_t count, int size) {
  const auto ranks = static_cast<std::size_t>(size);
  std::vector<std::int64_t> last(ranks + 1, 0);
  last.back() = count;
  std::vector<std::int64_t> ragged(ranks + 1, count - count / 9);
  ragged[0] = ragged[1] = 0;
  if (size > 2) ragged[2] = std::min<std::int64_t>(count, 1);
  ragged.back() = count;
  std::ranges::sort(ragged);
  return {RowCut(count, size), RowCut(last), RowCut(ragged)};
}

inline float round_to(Dtype dtype, float value) {
  if (dtype == Dtype::kBf16) return to_float(to_bf16(value));
  if (dtype == Dtype::kF16) return to_float(to_f16(value));
  return value;
}

// Small integers: their sums over a few ranks are exact in every dtype, bf16 included.
inline double small_integer(int rank, std::int64_t i) {
  return static_cast<double>((i * 7 + rank * 3) % 13);
}

// Any magnitude and sign, the same for the same arguments.
inline float noise(int rank, std::int64_t i) {
  std::uint64_t x = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15U +
                    static_cast<std::uint64_t>(rank + 1) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  x ^= x >> 31;
  const auto fraction = static_cast<float>(x % 20001) / 10000.0F - 1.0F;
  return std::ldexp(fraction, static_cast<int>((x >> 40) % 24) - 12);
}

}  // namespace hsdp::test
