#include <cstddef>
#include <cstdint>

// First of the Highway headers.
#include "hsdp/kernels/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "zero/adamw_simd.cpp"
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on

#include "hsdp/kernels/float_environment.h"
#include "hsdp/kernels/simd_dispatch.h"
#include "zero/adamw_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace hsdp::zero {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

void update_slice(const AdamWSlice& slice, const AdamWNumbers& numbers) {
  adamw_scalar(slice, 0, numbers);
}

#else

namespace hn = hwy::HWY_NAMESPACE;

// updated(), operation by operation.
void update_slice(const AdamWSlice& slice, const AdamWNumbers& numbers) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto grad_factor = hn::Set(d, numbers.grad_factor);
  const auto take1 = hn::Set(d, numbers.take1);
  const auto beta2 = hn::Set(d, numbers.beta2);
  const auto take2 = hn::Set(d, numbers.take2);
  const auto root = hn::Set(d, numbers.root);
  const auto epsilon = hn::Set(d, numbers.epsilon);
  const auto keep = hn::Set(d, numbers.keep);
  const auto rate = hn::Set(d, numbers.rate);
  std::int64_t i = 0;
  for (; i + lanes <= slice.count; i += lanes) {
    const auto g = hn::Mul(hn::LoadU(d, slice.gradient + i), grad_factor);
    auto m = hn::LoadU(d, slice.first + i);
    m = hn::Add(m, hn::Mul(hn::Sub(g, m), take1));
    auto v = hn::LoadU(d, slice.second + i);
    v = hn::Add(hn::Mul(v, beta2), hn::Mul(hn::Mul(g, g), take2));
    const auto denominator = hn::Add(hn::Div(hn::Sqrt(v), root), epsilon);
    const auto kept = hn::Mul(hn::LoadU(d, slice.parameter + i), keep);
    const auto p = hn::Sub(kept, hn::Mul(rate, hn::Div(m, denominator)));
    hn::StoreU(p, d, slice.parameter + i);
    hn::StoreU(m, d, slice.first + i);
    hn::StoreU(v, d, slice.second + i);
  }
  adamw_scalar(slice, i, numbers);
}

#endif  // a target with vectors

}  // namespace HWY_NAMESPACE
}  // namespace hsdp::zero
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace hsdp::zero {

HWY_EXPORT(update_slice);

void adamw_simd(const AdamWSlice& slice, const AdamWNumbers& numbers) {
  if (kernels::simd_choice().scalar) return adamw_reference(slice, numbers);
  const kernels::DefaultFloatEnvironment environment;
  HSDP_SIMD_DISPATCH(update_slice)(slice, numbers);
}

}  // namespace hsdp::zero

#endif  // HWY_ONCE
