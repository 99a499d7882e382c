// The body of the CUDA kernel behind every element-wise pass over contiguous memory: rows -> sum ->
// steps of arithmetic.h -> outputs. Internal to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_pass.h"

namespace hsdp::kernels {

// The start of a sum: kNothing + x is x, to the bit.
constexpr float kNothing = -0.0F;

// kSeveral: at least two rows; otherwise one or none.
template <class Rows, int kRowBytes, bool kSeveral>
struct RowPassBody {
  static constexpr int kResident = kSeveral ? 2 : 3;  // minimum blocks per multiprocessor
  struct Shared {};
  // Groups in flight per thread: from several rows, or from the only one.
  static constexpr int kAtOnce = (kSeveral ? 16 : 8) / kRowBytes;
  using Raw = RawBytes<kRowBytes * kGroupElements>;

  DevicePass pass;
  Rows rows;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      const std::int64_t rank = block.rank(thread);
      std::uint32_t largest =
          kSeveral ? sum_groups(rank, block.size()) : move_groups(rank, block.size());
      const std::int64_t tail = pass.head + pass.groups() * kGroupElements;
      const std::int64_t i = rank < pass.head ? rank : tail + rank - pass.head;
      if (i < pass.count) {
        const std::uint32_t magnitude = finish_element(pass, i, sum_element(i));
        largest = magnitude > largest ? magnitude : largest;
      }
      block.raise(largest >= nonfinite_magnitude(pass.out_dtype), pass.nonfinite);
    });
  }

 private:
  [[nodiscard]] HSDP_HOST_DEVICE Raw load(int row, std::int64_t begin) const {
    return load_raw<kRowBytes * kGroupElements>(static_cast<const char*>(rows.at(row)) +
                                                begin * kRowBytes);
  }

  [[nodiscard]] HSDP_HOST_DEVICE Group sent(const Raw& raw) const {
    Group group = decode_raw<kRowBytes>(raw, pass.row_dtype);
    if (kRowBytes == 4 && pass.wire_dtype != Dtype::kF32) {
      HSDP_UNROLL
      for (float& value : group.values) value = as_sent(value, pass.send_scale, pass.wire_dtype);
    }
    return group;
  }

  [[nodiscard]] HSDP_HOST_DEVICE float sum_element(std::int64_t i) const {
    float sum = pass.row_count > 0 ? kNothing : 0.0F;
    for (int row = 0; row < pass.row_count; ++row) {
      sum += as_sent(decode(rows.at(row), i, pass.row_dtype), pass.send_scale, pass.wire_dtype);
    }
    return sum;
  }

  // One row or none: several groups at once.
  [[nodiscard]] HSDP_HOST_DEVICE std::uint32_t move_groups(std::int64_t rank,
                                                           std::int64_t size) const {
    std::uint32_t largest = 0;
    const std::int64_t groups = pass.groups();
    for (std::int64_t first = rank; first < groups; first += kAtOnce * size) {
      Raw raw[kAtOnce];
      HSDP_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const std::int64_t group = first + k * size;
        if (pass.row_count > 0 && group < groups) {
          raw[k] = load(0, pass.head + group * kGroupElements);
        }
      }
      HSDP_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const std::int64_t group = first + k * size;
        if (group >= groups) break;
        const Group sums = pass.row_count > 0 ? sent(raw[k]) : Group{};
        const std::uint32_t magnitude =
            finish_group(pass, pass.head + group * kGroupElements, sums);
        largest = magnitude > largest ? magnitude : largest;
      }
    }
    return largest;
  }

  // Several rows: one group, several rows at once, added in ascending order.
  [[nodiscard]] HSDP_HOST_DEVICE std::uint32_t sum_groups(std::int64_t rank,
                                                          std::int64_t size) const {
    std::uint32_t largest = 0;
    const std::int64_t groups = pass.groups();
    for (std::int64_t group = rank; group < groups; group += size) {
      const std::int64_t begin = pass.head + group * kGroupElements;
      Group sums;
      HSDP_UNROLL
      for (float& value : sums.values) value = kNothing;
      for (int first = 0; first < pass.row_count; first += kAtOnce) {
        Raw raw[kAtOnce];
        HSDP_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          if (first + k < pass.row_count) raw[k] = load(first + k, begin);
        }
        HSDP_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          if (first + k >= pass.row_count) break;
          const Group row = sent(raw[k]);
          HSDP_UNROLL
          for (int i = 0; i < kGroupElements; ++i) sums.values[i] += row.values[i];
        }
      }
      const std::uint32_t magnitude = finish_group(pass, begin, sums);
      largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
  }
};

}  // namespace hsdp::kernels
