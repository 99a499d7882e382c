// The bodies of the CUDA kernels that pack non-contiguous gradients. Internal to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_pass.h"
#include "hsdp/kernels/device_plan.h"

namespace hsdp::kernels {

// Divides in 32 bits where they are enough: a GPU has no 64-bit divide instruction.
struct Division {
  HSDP_HOST_DEVICE Division(std::int64_t dividend, std::int64_t divisor) {
    if (((dividend | divisor) >> 32) == 0) {
      const auto a = static_cast<std::uint32_t>(dividend);
      const auto b = static_cast<std::uint32_t>(divisor);
      quotient = a / b;
      remainder = a % b;
    } else {
      quotient = dividend / divisor;
      remainder = dividend % divisor;
    }
  }
  std::int64_t quotient;
  std::int64_t remainder;
};

template <int kElementBytes>
HSDP_HOST_DEVICE inline float load_element(const void* address, Dtype dtype) {
  if constexpr (kElementBytes == 4) {
    return std::bit_cast<float>(static_cast<const AccessOf4*>(address)->words[0]);
  } else {
    return decode_bits(static_cast<const AccessOf2*>(address)->half, dtype);
  }
}

// Each thread locates its elements. For gradients whose innermost stride is the smallest.
template <int kElementBytes>
struct GatherBody {
  static constexpr int kResident = 4;  // minimum blocks per multiprocessor
  struct Shared {};

  DevicePass pass;  // covers the window; row_dtype is the gradient's
  const char* gradient = nullptr;
  GatherPlan plan;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      for (std::int64_t g = block.rank(thread); g < groups_over(pass.count); g += block.size()) {
        pack(group_begin(pass, g));
      }
    });
  }

 private:
  // Row `index`, counted over all dimensions but the last.
  [[nodiscard]] HSDP_HOST_DEVICE const char* row(std::int64_t index) const {
    std::int64_t offset = 0;
    for (int d = plan.dimension_count - 2; d >= 0; --d) {
      const Division at(index, plan.dimensions[d].extent);
      offset += at.remainder * plan.dimensions[d].stride;
      index = at.quotient;
    }
    return gradient + offset * kElementBytes;
  }

  HSDP_HOST_DEVICE void pack(std::int64_t first) const {
    const StridedDimension& inner = plan.dimensions[plan.dimension_count - 1];
    const std::int64_t from = first < 0 ? 0 : first;
    const std::int64_t to =
        first + kGroupElements < pass.count ? first + kGroupElements : pass.count;
    if (from >= to) return;
    Division at(plan.begin + from, inner.extent);
    const char* source = row(at.quotient);
    const bool whole = to - from == kGroupElements;
    if (whole && inner.stride == 1 && at.remainder + kGroupElements <= inner.extent) {
      finish_group(pass, first,
                   decode_raw<kElementBytes>(load_raw<kElementBytes * kGroupElements>(
                                                 source + at.remainder * kElementBytes),
                                             pass.row_dtype));
      return;
    }
    Group group{};
    HSDP_UNROLL
    for (int k = 0; k < kGroupElements; ++k) {
      if (first + k < from || first + k >= to) continue;
      if (at.remainder == inner.extent) {
        at.remainder = 0;
        source = row(++at.quotient);
      }
      group.values[k] = load_element<kElementBytes>(
          source + at.remainder * inner.stride * kElementBytes, pass.row_dtype);
      ++at.remainder;
      if (!whole) finish_element(pass, first + k, group.values[k]);
    }
    if (whole) finish_group(pass, first, group);
  }
};

}  // namespace hsdp::kernels
