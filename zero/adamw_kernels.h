// The kernels of AdamW: one counts a step, the other updates slices by its numbers. The arithmetic
// is that of adamw_arithmetic.h: the bits do not depend on SIMD width or device. Kernels run inside
// a task of the stream, in memory of its device [Note: kernels on a stream]. Internal to zero/.
#pragma once

#include <cstdint>
#include <span>

#include "hsdp/device/stream.h"
#include "zero/adamw_arithmetic.h"

namespace hsdp::zero {

struct AdamWSlice {
  float* parameter = nullptr;
  const float* gradient = nullptr;
  float* first = nullptr;
  float* second = nullptr;
  std::int64_t count = 0;
};

// Writes whether the step is skipped; if not, counts it and writes its numbers.
void adamw_tick(const AdamWTick& args, const Stream& stream);

// Updates by the numbers that the last tick has left in `clock`.
void adamw_update(std::span<const AdamWSlice> slices, const AdamWClock* clock,
                  const Stream& stream);

// The scalar definition, on the host.
void adamw_reference(const AdamWSlice& slice, const AdamWNumbers& numbers);

// The implementations on the host: elements [begin, count) one by one, and by the SIMD target in
// use.
void adamw_scalar(const AdamWSlice& slice, std::int64_t begin, const AdamWNumbers& numbers);
void adamw_simd(const AdamWSlice& slice, const AdamWNumbers& numbers);

// Only enqueue. In a build without CUDA, where no such stream can exist, no_device_adamw.cpp
// replaces them.
void adamw_tick_on_device(const AdamWTick& args, const Stream& stream);
void adamw_update_on_device(std::span<const AdamWSlice> slices, const AdamWClock* clock,
                            const Stream& stream);

}  // namespace hsdp::zero
