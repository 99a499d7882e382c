// Element types and their scalar conversions: round to nearest even, subnormals kept, infinities
// and NaN preserved (a NaN stays a NaN, but its payload may change).
//
// The scalar functions define the arithmetic: host SIMD and CUDA kernels must equal them bit for
// bit.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#if defined(__CUDACC__)
#define HSDP_HOST_DEVICE __host__ __device__
#else
#define HSDP_HOST_DEVICE
#endif

namespace hsdp {

// f32, bf16, f16 and f64 go through the kernels and may be gradients; f64 stays f64 throughout. i64
// can only be reduced, u8 only moved.
enum class Dtype : std::uint8_t { kF32 = 0, kBf16 = 1, kF16 = 2, kF64 = 3, kI64 = 4, kU8 = 5 };

[[nodiscard]] std::size_t size_bytes(Dtype dtype);
[[nodiscard]] std::string_view name(Dtype dtype);
// Accepts "f32", "float32", "bf16", "bfloat16", ...; throws UsageError, listing them, for others.
[[nodiscard]] Dtype parse_dtype(std::string_view text);
[[nodiscard]] constexpr bool sums_in_f32(Dtype dtype) {
  return dtype == Dtype::kF32 || dtype == Dtype::kBf16 || dtype == Dtype::kF16;
}
[[nodiscard]] constexpr bool is_gradient_dtype(Dtype dtype) {
  return sums_in_f32(dtype) || dtype == Dtype::kF64;
}
// The dtype in which gradients with this wire dtype are summed and stored as sums.
[[nodiscard]] constexpr Dtype sum_dtype(Dtype wire) {
  return wire == Dtype::kF64 ? Dtype::kF64 : Dtype::kF32;
}

// Storage of one 16-bit element.
struct Bf16 {
  std::uint16_t bits = 0;
};
struct F16 {
  std::uint16_t bits = 0;
};

HSDP_HOST_DEVICE constexpr float to_float(Bf16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}
HSDP_HOST_DEVICE constexpr float to_float(float x) { return x; }

HSDP_HOST_DEVICE constexpr Bf16 to_bf16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffU) > 0x7f800000U) {
    return {static_cast<std::uint16_t>((u >> 16) | 0x40U)};  // quiet, so that it stays a NaN
  }
  return {static_cast<std::uint16_t>((u + 0x7fffU + ((u >> 16) & 1U)) >> 16)};
}

HSDP_HOST_DEVICE constexpr float to_float(F16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000U) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fU;
  const std::uint32_t mantissa = x.bits & 0x3ffU;
  if (exponent == 0x1fU) {
    return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
  }
  // Subnormal: mantissa * 2^-24, exact in fp32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

HSDP_HOST_DEVICE constexpr F16 to_f16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000U);
  const std::uint32_t magnitude = u & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return {static_cast<std::uint16_t>(sign | 0x7e00U)};
  }
  if (magnitude >= 0x477ff000U) {  // 65520 and above round to infinity
    return {static_cast<std::uint16_t>(sign | 0x7c00U)};
  }
  if (magnitude >= 0x38800000U) {  // normal in f16: 2^-14 and above
    const std::uint32_t rebased = magnitude - (112U << 23);
    const std::uint32_t rounded = rebased + 0xfffU + ((rebased >> 13) & 1U);
    return {static_cast<std::uint16_t>(sign | (rounded >> 13))};
  }
  if (magnitude <= 0x33000000U) {  // 2^-25 and below: the tie rounds to the even zero
    return {sign};
  }
  // Subnormal: shift the significand to units of 2^-24, and round to nearest even.
  const std::uint32_t shift = 126U - (magnitude >> 23);
  const std::uint32_t significand = (magnitude & 0x7fffffU) | 0x800000U;
  const std::uint32_t floor = significand >> shift;
  const std::uint32_t rest = significand & ((1U << shift) - 1U);
  const std::uint32_t half = 1U << (shift - 1U);
  const std::uint32_t up = (rest > half || (rest == half && (floor & 1U) != 0U)) ? 1U : 0U;
  return {static_cast<std::uint16_t>(sign | (floor + up))};
}

}  // namespace hsdp
