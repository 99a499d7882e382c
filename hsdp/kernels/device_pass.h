// RowPass as the argument of a CUDA kernel, and its last steps for a group or an element. Internal
// to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/kernels/device_group.h"

namespace hsdp::kernels {

constexpr int kMostOuts = 8;
constexpr int kMostListedRows = 400;  // keeps all arguments of a kernel within 4 KiB

// EvenRows: any number of rows at equal distances. ListedRows: any addresses.
struct EvenRows {
  const char* first = nullptr;
  std::int64_t distance = 0;  // bytes
  [[nodiscard]] HSDP_HOST_DEVICE const void* at(int row) const { return first + row * distance; }
};
struct ListedRows {
  const void* rows[kMostListedRows];
  [[nodiscard]] HSDP_HOST_DEVICE const void* at(int row) const { return rows[row]; }
};

struct DevicePass {
  int row_count = 0;  // 0: the sum is zero
  Dtype row_dtype = Dtype::kF32;
  Dtype wire_dtype = Dtype::kF32;
  float send_scale = 1.0F;
  const void* add = nullptr;
  Dtype add_dtype = Dtype::kF32;
  const void* base = nullptr;  // f32; if set, the sums are those of the rows and `add`
  ElementSteps steps;
  void* outs[kMostOuts] = {};
  int out_count = 0;
  Dtype out_dtype = Dtype::kF32;
  std::int64_t count = 0;
  std::int64_t head = 0;  // elements before the first aligned group
  std::uint32_t* nonfinite = nullptr;

  [[nodiscard]] HSDP_HOST_DEVICE std::int64_t groups() const {
    return (count - head) / kGroupElements;
  }
};

// How many groups cover `count` elements: the outer ones may reach beyond them.
HSDP_HOST_DEVICE inline std::int64_t groups_over(std::int64_t count) {
  return (count + std::int64_t{2} * kGroupElements - 2) / kGroupElements;
}
HSDP_HOST_DEVICE inline std::int64_t group_begin(const DevicePass& pass, std::int64_t group) {
  return group * kGroupElements - (kGroupElements - pass.head) % kGroupElements;
}

// finish() of every element. Skips steps that change nothing; the whole grid skips the same ones.
HSDP_HOST_DEVICE inline Group finished(Group t, bool has_add, const Group& add,
                                       const ElementSteps& steps) {
  const auto scale = [&t](float factor) {
    if (factor == 1.0F) return;
    HSDP_UNROLL
    for (float& value : t.values) value = value * factor;
  };
  scale(steps.sum_scale);
  if (has_add) {
    HSDP_UNROLL
    for (int i = 0; i < kGroupElements; ++i) t.values[i] = add.values[i] + t.values[i];
  }
  if (steps.total_dtype != Dtype::kF32) {
    HSDP_UNROLL
    for (float& value : t.values) {
      value = rounded_through(value * steps.total_scale, steps.total_dtype);
    }
  }
  scale(steps.result_scale);
  if (steps.divisor != 1.0F) {
    HSDP_UNROLL
    for (float& value : t.values) value = value / steps.divisor;
  }
  scale(steps.multiplier);
  return t;
}

// Computes the outputs from the sums of the rows, for the group or the element at `begin`. Returns
// the largest magnitude_bits() if there is a flag to set.
HSDP_HOST_DEVICE inline std::uint32_t finish_group(const DevicePass& pass, std::int64_t begin,
                                                   Group sums) {
  Group add{};
  if (pass.add != nullptr) {
    add = load_group(at_element(pass.add, begin, pass.add_dtype), pass.add_dtype);
  }
  if (pass.base != nullptr) {
    if (pass.add != nullptr) {
      HSDP_UNROLL
      for (int i = 0; i < kGroupElements; ++i) sums.values[i] = add.values[i] + sums.values[i];
    }
    add = load_group(at_element(pass.base, begin, Dtype::kF32), Dtype::kF32);
  }
  const bool has_add = pass.add != nullptr || pass.base != nullptr;
  const Group results = finished(sums, has_add, add, pass.steps);
  std::uint32_t largest = 0;
  if (pass.nonfinite != nullptr) {
    HSDP_UNROLL
    for (const float result : results.values) {
      const std::uint32_t magnitude = magnitude_bits(result);
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  for (int o = 0; o < pass.out_count; ++o) {
    store_group(results, at_element(pass.outs[o], begin, pass.out_dtype), pass.out_dtype);
  }
  return largest;
}

HSDP_HOST_DEVICE inline std::uint32_t finish_element(const DevicePass& pass, std::int64_t i,
                                                     float sum) {
  float add = pass.add == nullptr ? 0.0F : decode(pass.add, i, pass.add_dtype);
  if (pass.base != nullptr) {
    if (pass.add != nullptr) sum = add + sum;
    add = decode(pass.base, i, Dtype::kF32);
  }
  const float result = finish(sum, pass.add != nullptr || pass.base != nullptr, add, pass.steps);
  for (int o = 0; o < pass.out_count; ++o) encode(result, pass.outs[o], i, pass.out_dtype);
  return magnitude_bits(result);
}

}  // namespace hsdp::kernels
