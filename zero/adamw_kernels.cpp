#include "zero/adamw_kernels.h"

#include "hsdp/kernels/float_environment.h"

namespace hsdp::zero {
namespace {

bool on_host(const Stream& stream) { return stream.device().type == DeviceType::kHost; }

// Called through pointers that the compiler cannot resolve: see DefaultFloatEnvironment.
void (*volatile tick_on_host)(const AdamWTick&) = tick;
void (*volatile scalar_update)(const AdamWSlice&, std::int64_t, const AdamWNumbers&) = adamw_scalar;

}  // namespace

void adamw_scalar(const AdamWSlice& slice, std::int64_t begin, const AdamWNumbers& numbers) {
  for (std::int64_t i = begin; i < slice.count; ++i) {
    const AdamWElement element =
        updated({slice.parameter[i], slice.first[i], slice.second[i]}, slice.gradient[i], numbers);
    slice.parameter[i] = element.parameter;
    slice.first[i] = element.first;
    slice.second[i] = element.second;
  }
}

void adamw_reference(const AdamWSlice& slice, const AdamWNumbers& numbers) {
  const kernels::DefaultFloatEnvironment environment;
  scalar_update(slice, 0, numbers);
}

void adamw_tick(const AdamWTick& args, const Stream& stream) {
  if (!on_host(stream)) return adamw_tick_on_device(args, stream);
  const kernels::DefaultFloatEnvironment environment;
  tick_on_host(args);
}

void adamw_update(std::span<const AdamWSlice> slices, const AdamWClock* clock,
                  const Stream& stream) {
  if (!on_host(stream)) return adamw_update_on_device(slices, clock, stream);
  if (clock->numbers.skip != 0) return;
  for (const AdamWSlice& slice : slices) adamw_simd(slice, clock->numbers);
}

}  // namespace hsdp::zero
