#include "hsdp/kernels/clip.h"

#include "hsdp/kernels/device_clip.h"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/float_environment.h"
#include "hsdp/kernels/scale_and_cast.h"

namespace hsdp::kernels {
namespace {

// Opaque to the compiler: see DefaultFloatEnvironment.
double (*volatile sum_on_host)(const double*, std::int64_t) = ordered_sum;
void (*volatile factor_on_host)(const ClipFactor&) = compute_clip_factor;

bool on_host(const Stream& stream) { return stream.device().type == DeviceType::kHost; }

}  // namespace

void sum_in_order(const double* values, std::int64_t count, double* sum, const Stream& stream) {
  if (!on_host(stream)) return sum_in_order_on_device(values, count, sum, stream);
  const DefaultFloatEnvironment environment;
  *sum = sum_on_host(values, count);
}

void clip_factor(const ClipFactor& args, const Stream& stream) {
  if (!on_host(stream)) return clip_factor_on_device(args, stream);
  const DefaultFloatEnvironment environment;
  factor_on_host(args);
}

void scale_by(TensorView values, const double* factor, const Stream& stream) {
  if (!on_host(stream)) return scale_by_on_device(values, factor, stream);
  if (*factor == 1.0) return;
  ScaleAndCast args;
  args.in = args.out = values.data;
  args.count = values.count;
  args.in_dtype = args.out_dtype = values.dtype;
  args.multiplier = *factor;
  scale_and_cast(args);
}

}  // namespace hsdp::kernels
