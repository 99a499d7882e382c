// What the kernels do to one element; the host and CUDA share this code
// [Note: one source for host and device].
//
//   t      = sum of the decoded rows               the caller's loop, ascending rank
//   t      = t * sum_scale
//   t      = add + t                               when there is an `add`
//   t      = decode(round(t * total_scale))        when total_dtype is 16-bit
//   result = t * result_scale / divisor * multiplier
//
// All in fp32, each operation rounded once, never contracted. The scales are exact powers of two,
// so a scale of 1 may be skipped. f64 elements take the same steps in fp64, where all scales are 1.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "hsdp/dtype.h"

namespace hsdp::kernels {

struct ElementSteps {
  float sum_scale = 1.0F;
  Dtype total_dtype = Dtype::kF32;
  float total_scale = 1.0F;
  float result_scale = 1.0F;
  float divisor = 1.0F;
  float multiplier = 1.0F;
};

// 2^exponent for -126 <= exponent <= 127.
HSDP_HOST_DEVICE constexpr float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// The conversions of dtype.h. For f16, and for rounding to bf16, a GPU uses instructions that give
// the same bits except for NaN.
HSDP_HOST_DEVICE inline float decode_f16(std::uint16_t bits) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  return to_float(F16{bits});
#endif
}

HSDP_HOST_DEVICE inline std::uint16_t encode_f16(float value) {
#if defined(__CUDA_ARCH__)
  std::uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  return to_f16(value).bits;
#endif
}

// Two bf16 values in a word, `low` at the lower address.
HSDP_HOST_DEVICE inline std::uint32_t encode_two_bf16(float low, float high) {
#if defined(__CUDA_ARCH__)
  std::uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return to_bf16(low).bits | static_cast<std::uint32_t>(to_bf16(high).bits) << 16;
#endif
}

// `dtype` is bf16 or f16.
HSDP_HOST_DEVICE inline std::uint16_t encode_half(float value, Dtype dtype) {
  return dtype == Dtype::kBf16 ? to_bf16(value).bits : encode_f16(value);
}

// Element `index` of a row; the row may lie at any byte address.
HSDP_HOST_DEVICE inline float decode(const void* row, std::int64_t index, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    float value = 0.0F;
    std::memcpy(&value, static_cast<const char*>(row) + index * 4, 4);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(row) + index * 2, 2);
  return dtype == Dtype::kBf16 ? to_float(Bf16{bits}) : decode_f16(bits);
}

// Like decode(), but also takes f64.
HSDP_HOST_DEVICE inline double decode_wide(const void* row, std::int64_t index, Dtype dtype) {
  if (dtype != Dtype::kF64) return decode(row, index, dtype);
  double value = 0.0;
  std::memcpy(&value, static_cast<const char*>(row) + index * 8, 8);
  return value;
}

HSDP_HOST_DEVICE inline void encode(float value, void* row, std::int64_t index, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    std::memcpy(static_cast<char*>(row) + index * 4, &value, 4);
    return;
  }
  const std::uint16_t bits = encode_half(value, dtype);
  std::memcpy(static_cast<char*>(row) + index * 2, &bits, 2);
}

// `value` converted to `dtype` and back.
HSDP_HOST_DEVICE inline float rounded_through(float value, Dtype dtype) {
  if (dtype == Dtype::kBf16) return to_float(to_bf16(value));
  if (dtype == Dtype::kF16) return decode_f16(encode_f16(value));
  return value;
}

// A row's element as the other ranks receive it; with `wire` kF32 it travels unchanged.
HSDP_HOST_DEVICE inline float as_sent(float value, float send_scale, Dtype wire) {
  return wire == Dtype::kF32 ? value : rounded_through(value * send_scale, wire);
}

// Computes the result from the sum of the rows; `add` counts only if `has_add`.
HSDP_HOST_DEVICE inline float finish(float sum, bool has_add, float add,
                                     const ElementSteps& steps) {
  float t = sum * steps.sum_scale;
  if (has_add) t = add + t;
  if (steps.total_dtype != Dtype::kF32) {
    t = rounded_through(t * steps.total_scale, steps.total_dtype);
  }
  t = t * steps.result_scale;
  if (steps.divisor != 1.0F) t = t / steps.divisor;  // worth a branch: bandwidth is the limit
  return t * steps.multiplier;
}

// finish() for an f64 element.
HSDP_HOST_DEVICE inline double finish_wide(double sum, bool has_add, double add, double divisor,
                                           double multiplier) {
  double t = has_add ? add + sum : sum;
  if (divisor != 1.0) t = t / divisor;
  return t * multiplier;
}

// Bits of |value|: they order like the magnitudes, and NaN lies above infinity.
HSDP_HOST_DEVICE constexpr std::uint32_t magnitude_bits(float value) {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffU;
}

// The smallest magnitude that becomes infinite (or NaN) when rounded to `dtype`. For f64, whose
// passes return kNonfinite or 0, it is kNonfinite.
constexpr std::uint32_t kNonfinite = 0x7f800000U;
HSDP_HOST_DEVICE constexpr std::uint32_t nonfinite_magnitude(Dtype dtype) {
  if (dtype == Dtype::kF16) return 0x477ff000U;   // 65520
  if (dtype == Dtype::kBf16) return 0x7f7f8000U;  // the tie above the largest bf16
  return kNonfinite;
}

}  // namespace hsdp::kernels
