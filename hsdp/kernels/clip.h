// Clips by a norm that stays in the memory of the stream's device, so that no thread waits for it.
// All functions run inside a task of the stream [Note: kernels on a stream].
#pragma once

#include <cstdint>

#include "hsdp/device/stream.h"
#include "hsdp/tensor_view.h"

namespace hsdp::kernels {

// *sum = 0 + values[0] + values[1] + ..., for sums of squares.
void sum_in_order(const double* values, std::int64_t count, double* sum, const Stream& stream);

// *norm = sqrt(squares[0] + squares[1] + ...). *factor = max_norm / (norm + epsilon) if that is
// below 1, else 1. Null pointers are skipped. All in fp64.
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

// values *= *factor, rounded to f32 for f32 values. Writes nothing when the factor is 1.
void scale_by(TensorView values, const double* factor, const Stream& stream);

}  // namespace hsdp::kernels
