// out = round(decode(in) * 2^exponent / divisor * multiplier, out_dtype), in fp32, in that order.
// Reads partials, decodes gathered wire buffers, clips. f64 stays f64, without an exponent.
#pragma once

#include <atomic>
#include <cstdint>

#include "hsdp/device/stream.h"
#include "hsdp/dtype.h"

namespace hsdp::kernels {

struct ScaleAndCast {
  const void* in = nullptr;
  Dtype in_dtype = Dtype::kF32;
  void* out = nullptr;  // may alias `in` exactly when the dtypes have the same size
  Dtype out_dtype = Dtype::kF32;
  std::int64_t count = 0;
  int exponent = 0;         // exact power of two, applied first
  double divisor = 1.0;     // IEEE division, applied second; rounded to fp32, except for f64
  double multiplier = 1.0;  // applied last; rounded like the divisor
  std::atomic<std::uint32_t>* nonfinite = nullptr;
  bool streaming_stores = false;
};

// On the calling thread, in host memory.
void scale_and_cast(const ScaleAndCast& args);
void scale_and_cast_reference(const ScaleAndCast& args);
// Inside a task of `stream`, in memory of its device [Note: kernels on a stream]. `nonfinite` is
// then a make_flag() word of that device.
void scale_and_cast(const ScaleAndCast& args, const Stream& stream);

}  // namespace hsdp::kernels
