// Hostile inputs and bitwise comparisons for the kernel tests.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "hostile_value.h"
#include "hsdp/dtype.h"
#include "hsdp/kernels/arithmetic.h"
#include "hsdp/kernels/simd_target.h"

namespace hsdp::kernels {

// `count` elements that start `offset` elements after an aligned address, between guards.
class Row {
 public:
  Row(Dtype dtype, std::int64_t count, std::size_t offset)
      : dtype_(dtype), count_(static_cast<std::size_t>(count)), offset_(offset + kGuard) {
    bytes_.assign((count_ + offset_ + kGuard) * size_bytes(dtype) + 64, std::byte{0xa5});
  }

  Row(const Row& other)
      : Row(other.dtype_, static_cast<std::int64_t>(other.count_), other.offset_ - kGuard) {
    std::memcpy(data(), const_cast<Row&>(other).data(), count_ * size_bytes(dtype_));
  }
  Row(Row&&) = default;  // the bytes do not move, so their alignment stays
  Row& operator=(const Row&) = delete;
  Row& operator=(Row&&) = delete;
  ~Row() = default;

  void fill(std::mt19937& random) {
    for (std::size_t i = 0; i < count_; ++i) {
      encode(hostile_value(random), data(), static_cast<std::int64_t>(i), dtype_);
    }
  }
  [[nodiscard]] std::byte* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    const std::size_t to_line = (64 - address % 64) % 64;
    return bytes_.data() + to_line + offset_ * size_bytes(dtype_);
  }
  [[nodiscard]] float at(std::size_t i) {
    return decode(data(), static_cast<std::int64_t>(i), dtype_);
  }
  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] Dtype dtype() const { return dtype_; }

  // Whether nothing was written before or after the elements.
  [[nodiscard]] bool guards_hold() {
    const std::byte* const begin = data();
    const std::byte* const end = begin + count_ * size_bytes(dtype_);
    for (const std::byte& value : bytes_) {
      const bool outside = &value < begin || &value >= end;
      if (outside && value != std::byte{0xa5}) return false;
    }
    return true;
  }

  // Compares bit for bit, except the payloads of NaNs.
  [[nodiscard]] std::string difference(Row& other) {
    for (std::size_t i = 0; i < count_; ++i) {
      const std::size_t bytes = size_bytes(dtype_);
      if (std::memcmp(data() + i * bytes, other.data() + i * bytes, bytes) == 0) continue;
      const float a = at(i);
      const float b = other.at(i);
      if (a != a && b != b) continue;
      return "element " + std::to_string(i) + " of " + std::to_string(count_) + ": " +
             std::to_string(a) + " and " + std::to_string(b);
    }
    return "";
  }

 private:
  static constexpr std::size_t kGuard = 32;
  Dtype dtype_;
  std::size_t count_;
  std::size_t offset_;
  std::vector<std::byte> bytes_;
};

// Runs the test body on one SIMD target.
class OnTarget : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    before_ = simd_target();
    force_simd_target(GetParam());
  }
  void TearDown() override { force_simd_target(before_); }

 private:
  std::string before_;
};

inline std::string target_name(const ::testing::TestParamInfo<std::string>& test) {
  return test.param;
}

constexpr Dtype kGradientDtypes[] = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};

}  // namespace hsdp::kernels
