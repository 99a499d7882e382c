// Packs gradients of any dense strides into contiguous elements of a bucket, in one pass.
//
//   v   = decode(gradient[begin + i])         row-major logical order
//   v   = decode(add[i]) + v                  when `add` is given (fp32 addition)
//   v   = base[i] + v                         when `base` is given, too
//   out = round(v * 2^-exponent, out_dtype)
//
// An f64 gradient takes the same steps in fp64 without an exponent; all operands are then f64. With
// `add == out` this is local accumulation. Rounds once, to nearest even. `add` and `base` may alias
// `out` exactly.
#pragma once

#include <cstdint>

#include "hsdp/device/stream.h"
#include "hsdp/dtype.h"
#include "hsdp/tensor_view.h"

namespace hsdp::kernels {

struct CastAndPack {
  const StridedView* gradient = nullptr;  // nullptr: zeros (a missing gradient)
  std::int64_t begin = 0;                 // first element, in row-major logical order
  std::int64_t count = 0;
  const void* add = nullptr;  // `count` elements of add_dtype
  Dtype add_dtype = Dtype::kF32;
  const void* base = nullptr;  // `count` elements of sum_dtype(out_dtype)
  int exponent = 0;
  Dtype out_dtype = Dtype::kF32;
  void* out = nullptr;
  bool streaming_stores = false;
};

// On the calling thread, in host memory.
void cast_and_pack(const CastAndPack& args);
// Throws UsageError if the device's kernels cannot take this gradient.
void require_packable(const StridedView& gradient);
// Throws UsageError for invalid arguments.
void check(const CastAndPack& args);
void cast_and_pack_reference(const CastAndPack& args);
// Inside a task of `stream`, in memory of its device [Note: kernels on a stream].
void cast_and_pack(const CastAndPack& args, const Stream& stream);

}  // namespace hsdp::kernels
