#include "hsdp/kernels/scale_and_cast.h"

#include <string>

#include "hsdp/error.h"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/row_pass.h"

namespace hsdp::kernels {
namespace {

constexpr const char* kScaleAndCast = "scale_and_cast";

void check(const ScaleAndCast& args) {
  require_gradient_dtype(args.in_dtype, kScaleAndCast, "input dtype");
  require_gradient_dtype(args.out_dtype, kScaleAndCast, "output dtype");
  require_one_width(args.in_dtype, args.out_dtype, {args.exponent}, kScaleAndCast);
  if (args.count < 0) {
    throw UsageError({.where = std::string(kScaleAndCast),
                      .expected = "a count of at least 0",
                      .got = std::to_string(args.count)});
  }
}

// The result refers to `args`.
RowPass make_pass(const ScaleAndCast& args) {
  RowPass pass;
  pass.rows = std::span(&args.in, 1);
  pass.row_dtype = args.in_dtype;
  pass.steps.result_scale = checked_power_of_two(args.exponent, kScaleAndCast);
  pass.steps.divisor = narrowed(args.divisor);
  pass.wide_divisor = args.divisor;
  pass.steps.multiplier = narrowed(args.multiplier);
  pass.wide_multiplier = args.multiplier;
  pass.outs = std::span(&args.out, 1);
  pass.out_dtype = args.out_dtype;
  pass.count = args.count;
  pass.streaming_stores = args.streaming_stores;
  return pass;
}

void scale(const ScaleAndCast& args, std::uint32_t (*run_pass)(const RowPass&)) {
  check(args);
  const bool finite = run_pass(make_pass(args)) < nonfinite_magnitude(args.out_dtype);
  if (!finite && args.nonfinite != nullptr) args.nonfinite->store(1, std::memory_order_relaxed);
}

}  // namespace

void scale_and_cast(const ScaleAndCast& args) { scale(args, run); }

void scale_and_cast_reference(const ScaleAndCast& args) { scale(args, run_scalar); }

void scale_and_cast(const ScaleAndCast& args, const Stream& stream) {
  if (stream.device().type == DeviceType::kHost) {
    scale_and_cast(args);
    return;
  }
  check(args);
  run_on_device(make_pass(args), args.nonfinite, stream);
}

}  // namespace hsdp::kernels
