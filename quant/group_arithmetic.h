// What the kernels do to a group and to one element; the host and CUDA share this code.
//
//   h       = g * factor + e                          or: a sum of decoded rows, + e
//   top     = the largest |h| of the group, taken on the bits
//   scale   = top / levels                            bf16 scales: rounded up to bf16
//   inverse = levels / top                            bf16 scales: 1 / scale
//   code    = rint(h * inverse)                       in -levels..levels without a clamp
//   d       = code * scale
//   e'      = beta * e + (1 - beta) * (h - d)
//
// All in fp32, each operation rounded once, to nearest even, never contracted. A group with a NaN
// or an infinity is marked: its scale is a NaN and its codes are 0. e' is stored as fp32, or
// quantized the same way with 127 levels and an fp32 scale.
//
// Sources: symmetric block quantization with 7 levels as in SDP4Bit (Jia et al., 2024), error
// feedback of LoCo (Xie et al., arXiv 2407.04480) [Note: levels and scales].
#pragma once

#include <bit>
#include <cstdint>

#include "hsdp/dtype.h"
#include "hsdp/kernels/arithmetic.h"
#include "quant/group_format.h"

namespace hsdp::quant {

using kernels::magnitude_bits;

constexpr std::uint32_t kInfinityBits = 0x7f800000U;
constexpr std::uint32_t kMarkBits = 0x7fc00000U;  // the scale of a marked group
// A group with a tiny top is lifted first; otherwise its inverse could be infinite.
constexpr float kTiny = 0x1p-64F;
constexpr float kLift = 0x1p64F;

// How one group is quantized.
struct GroupScaling {
  float scale = 0.0F;
  float lift = 1.0F;
  float inverse = 0.0F;
};

// The same for all groups of a kernel.
struct ScalingRule {
  float levels = 7.0F;
  float most = 0.0F;  // largest scale: `levels` times it is still finite
  bool to_bf16 = false;
};

HSDP_HOST_DEVICE constexpr ScalingRule scaling_rule(Code code, Dtype scale_dtype) {
  const bool int4 = code == Code::kInt4;
  // FLT_MAX / 7 is exact; FLT_MAX / 127 rounds up, so one step below it. As bf16: rounded down.
  const std::uint32_t most = int4 ? 0x7e124924U : 0x7c010203U;
  const bool to_bf16 = scale_dtype == Dtype::kBf16;
  return {int4 ? 7.0F : 127.0F, std::bit_cast<float>(to_bf16 ? most & 0xffff0000U : most), to_bf16};
}

// The smallest bf16 that is at least `value`, for value >= 0.
HSDP_HOST_DEVICE constexpr float up_to_bf16(float value) {
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(value) + 0xffffU) & 0xffff0000U);
}

// `top_bits`: the largest magnitude_bits() of the group.
HSDP_HOST_DEVICE inline GroupScaling scaling_of(std::uint32_t top_bits, const ScalingRule& rule) {
  if (top_bits >= kInfinityBits) return {std::bit_cast<float>(kMarkBits), 1.0F, 0.0F};
  const float top = std::bit_cast<float>(top_bits);
  const float lift = top < kTiny ? kLift : 1.0F;
  float scale = top / rule.levels;
  scale = scale < rule.most ? scale : rule.most;
  if (!rule.to_bf16) return {scale, lift, top == 0.0F ? 0.0F : rule.levels / (top * lift)};
  scale = up_to_bf16(scale);
  scale = scale < rule.most ? scale : rule.most;
  return {scale, lift, scale == 0.0F ? 0.0F : 1.0F / (scale * lift)};
}

constexpr float kUnitIsOne = 0x1.8p23F;  // floats near it have a last place worth 1

// Rounds to the nearest integer, ties to even; |x| < 2^22.
HSDP_HOST_DEVICE inline std::int32_t rounded(float x) {
  return static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(x + kUnitIsOne)) -
         static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(kUnitIsOne));
}

// Not for a marked group.
HSDP_HOST_DEVICE inline std::int32_t code_of(float h, const GroupScaling& scaling) {
  return rounded(h * scaling.lift * scaling.inverse);
}
HSDP_HOST_DEVICE inline std::int32_t code_of(float h, const GroupScaling& scaling, float dither) {
  return rounded(h * scaling.lift * scaling.inverse + dither);
}

HSDP_HOST_DEVICE inline float decoded(std::int32_t code, float scale) {
  return static_cast<float>(code) * scale;
}

// `keep` is beta, `take` is 1 - beta in fp32.
HSDP_HOST_DEVICE inline float next_error(float e, float h, float d, float keep, float take) {
  const float kept = keep * e;
  const float missed = h - d;
  const float taken = take * missed;
  return kept + taken;
}

}  // namespace hsdp::quant
