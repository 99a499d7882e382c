// The body of the CUDA kernel that makes a number of a flag. Internal to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/kernels/device_block.h"

namespace hsdp::kernels {

struct IndicateBody {
  static constexpr int kResident = 1;  // blocks of a multiprocessor, at least
  struct Shared {};

  const void* word = nullptr;
  float* out = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      if (block.rank(thread) != 0) return;
      const std::uint32_t bits = *static_cast<const volatile std::uint32_t*>(word);
      *out = (bits & 0x7fffffffU) != 0 ? 1.0F : 0.0F;  // -0.0 is 0
    });
  }
};

}  // namespace hsdp::kernels
