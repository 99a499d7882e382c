#include "quant/group_format.h"

#include <string>

#include "hsdp/error.h"

namespace hsdp::quant {

std::string_view name(Code code) {
  switch (code) {
    case Code::kInt4:
      return "int4";
    case Code::kInt8:
      return "int8";
    case Code::kBf16:
      return "bf16";
  }
  return "unknown";
}

void require_valid(const GroupFormat& format) {
  if (format.group_size % kLeastGroupSize != 0 || format.group_size < kLeastGroupSize ||
      format.group_size > kMostGroupSize) {
    throw UsageError({.where = "quant: group_size",
                      .expected = "a multiple of 32 from 32 to 4096",
                      .got = std::to_string(format.group_size)});
  }
  if (format.scale_dtype != Dtype::kBf16 && format.scale_dtype != Dtype::kF32) {
    throw UsageError({.where = "quant: scale_dtype",
                      .expected = "bf16 or f32",
                      .got = std::string(hsdp::name(format.scale_dtype))});
  }
}

}  // namespace hsdp::quant
