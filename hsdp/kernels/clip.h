// Clipping by a norm that nobody waits for: it stays in memory of the stream's device. All of these
// run inside a task of the stream [Note: kernels on a stream].
#pragma once

#include <cstdint>

#include "hsdp/device/stream.h"
#include "hsdp/tensor_view.h"

namespace hsdp::kernels {

// *sum = 0 + values[0] + values[1] + ..., for sums of squares.
void sum_in_order(const double* values, std::int64_t count, double* sum, const Stream& stream);

// *norm = sqrt(squares[0] + squares[1] + ...); *factor, unless they are null, = max_norm over the
// norm plus epsilon where that is below 1, else 1. All in fp64.
struct ClipFactor {
  const double* squares = nullptr;
  std::int64_t count = 0;
  double max_norm = 0.0;
  double epsilon = 0.0;
  double* norm = nullptr;
  double* factor = nullptr;
  float* narrow_factor = nullptr;  // the same, rounded
};
void clip_factor(const ClipFactor& args, const Stream& stream);

// values *= *factor, which f32 values take rounded to f32; nothing is written where it is 1.
void scale_by(TensorView values, const double* factor, const Stream& stream);

}  // namespace hsdp::kernels
