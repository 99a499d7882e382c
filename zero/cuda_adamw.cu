#include <algorithm>

#include "hsdp/kernels/cuda_launch.cuh"
#include "hsdp/kernels/device_plan.h"
#include "zero/adamw_kernels.h"
#include "zero/device_adamw.h"

namespace hsdp::zero {

void adamw_tick_on_device(const AdamWTick& args, const Stream& stream) {
  kernels::launch(AdamWTickBody{args}, 1, stream);
}

void adamw_update_on_device(std::span<const AdamWSlice> slices, const AdamWClock* clock,
                            const Stream& stream) {
  for (const AdamWSlice& slice : slices) {
    kernels::require_alignment(slice.parameter, Dtype::kF32);
    kernels::require_alignment(slice.gradient, Dtype::kF32);
    kernels::require_alignment(slice.first, Dtype::kF32);
    kernels::require_alignment(slice.second, Dtype::kF32);
  }
  while (!slices.empty()) {
    AdamWUpdateBody body;
    body.clock = clock;
    const auto count = std::min<std::size_t>(slices.size(), AdamWUpdateBody::kMostSlices);
    for (const AdamWSlice& slice : slices.first(count)) body.add(slice);
    if (body.piece_count() > 0) kernels::launch(body, body.piece_count(), stream);
    slices = slices.subspan(count);
  }
}

}  // namespace hsdp::zero
