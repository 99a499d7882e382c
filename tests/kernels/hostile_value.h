// Values that break careless arithmetic.
#pragma once

#include <bit>
#include <cstdint>
#include <random>

namespace hsdp::kernels {

// A random value of one of the kinds that arithmetic often gets wrong.
inline float hostile_value(std::mt19937& random) {
  const auto bits = static_cast<std::uint32_t>(random());
  const std::uint32_t sign = bits & 0x80000000U;
  const std::uint32_t mantissa = bits & 0x7fffffU;
  const auto with_exponent = [&](std::uint32_t exponent) {
    return std::bit_cast<float>(sign | (exponent << 23) | mantissa);
  };
  switch (random() % 16) {
    case 0:
      return std::bit_cast<float>(sign);  // zeros
    case 1:
      return std::bit_cast<float>(sign | mantissa);  // subnormals
    case 2:
      return std::bit_cast<float>(sign | 0x7f800000U | (random() % 3 == 0 ? mantissa : 0));
    case 3:
      return with_exponent(254U - static_cast<std::uint32_t>(random() % 3));  // near the largest
    case 4:
      return with_exponent(1U + static_cast<std::uint32_t>(random() % 12));  // near the smallest
    case 5:
      return with_exponent(100U + static_cast<std::uint32_t>(random() % 16));  // f16 subnormals
    case 6:
      return with_exponent(140U + static_cast<std::uint32_t>(random() % 6));  // f16 overflow
    case 7:
      return static_cast<float>(static_cast<int>(random() % 513) - 256);
    case 8:  // ties of f16 and of bf16
      return std::bit_cast<float>((bits & 0xffffe000U) | 0x1000U);
    case 9:
      return std::bit_cast<float>((bits & 0xffff0000U) | 0x8000U);
    default:
      return with_exponent(117U + static_cast<std::uint32_t>(random() % 12));
  }
}

}  // namespace hsdp::kernels
