// A flag of a device as a number on it, for what reads it there.
#pragma once

#include "hsdp/device/stream.h"

namespace hsdp::kernels {

// *out = 1 when `word` is not 0, else 0, inside a task of a CUDA stream [Note: kernels on a
// stream]. `word`: a make_flag() word, or an f32 sum of what this made; it may be `out`.
void indicate(const void* word, float* out, const Stream& stream);

}  // namespace hsdp::kernels
