// The format of quantized numbers on the wire: docs/quant_format.md.
//
// A group lies between two multiples of the group size in a flattened parameter; the ends of a
// slice cut it short. Its codes are integers, which its scale multiplies. No group spans two
// parameters [Note: groups].
#pragma once

#include <cstdint>
#include <string_view>

#include "hsdp/dtype.h"

namespace hsdp::quant {

// kBf16: every element is rounded to bf16, without groups or scales.
enum class Code : std::uint8_t { kInt4, kInt8, kBf16 };
[[nodiscard]] std::string_view name(Code code);

constexpr int kLeastGroupSize = 32;
constexpr int kMostGroupSize = 4096;
constexpr std::int64_t kRowAlignment = 16;  // bytes, for a row's scales and for its codes

struct GroupFormat {
  Code code = Code::kInt4;
  int group_size = 64;               // a multiple of 32 up to 4096
  Dtype scale_dtype = Dtype::kBf16;  // or f32
};

// Throws UsageError for an invalid format.
void require_valid(const GroupFormat& format);

[[nodiscard]] HSDP_HOST_DEVICE constexpr std::int64_t padded(std::int64_t count,
                                                             std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// The size of one scale.
[[nodiscard]] HSDP_HOST_DEVICE constexpr int scale_bytes(const GroupFormat& format) {
  if (format.code == Code::kBf16) return 0;
  return format.scale_dtype == Dtype::kF32 ? 4 : 2;
}

// The size of the codes of a group of `count` elements.
[[nodiscard]] HSDP_HOST_DEVICE constexpr std::int64_t code_bytes(Code code, std::int64_t count) {
  if (code == Code::kBf16) return 2 * count;
  return padded(code == Code::kInt4 ? (count + 1) / 2 : count, 4);
}

}  // namespace hsdp::quant
