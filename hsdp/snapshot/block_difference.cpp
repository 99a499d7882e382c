#include "hsdp/snapshot/block_difference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hsdp/snapshot/block_difference.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace hsdp::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<double>;
using V = hn::Vec<D>;
constexpr std::size_t kMaxLanes = HWY_MAX_BYTES / sizeof(double);

HWY_INLINE V load(D d, const double* x) { return hn::LoadU(d, x); }
HWY_INLINE V load(D d, const float* x) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, D>(), x));
}

struct Sums {
  V max_difference, max_a, max_b, max_scaled, squared_difference, squared_a, squared_b, product;
};

HWY_INLINE void add(D d, Sums& sums, V a, V b, V smallest_power) {
  const hn::RebindToUnsigned<D> du;
  const V difference = hn::Abs(hn::Sub(a, b));
  const V size_a = hn::Abs(a);
  const V size_b = hn::Abs(b);
  // 2^-exponent of the larger one, by integer arithmetic on its exponent field.
  const auto exponent_field = hn::Set(du, std::uint64_t{0x7ff0000000000000});
  const V power =
      hn::Max(hn::BitCast(d, hn::And(hn::BitCast(du, hn::Max(size_a, size_b)), exponent_field)),
              smallest_power);
  const auto one_over =
      hn::Sub(hn::Set(du, std::uint64_t{0x7fe0000000000000}), hn::BitCast(du, power));
  sums.max_scaled = hn::Max(sums.max_scaled, hn::Mul(difference, hn::BitCast(d, one_over)));
  sums.max_difference = hn::Max(sums.max_difference, difference);
  sums.max_a = hn::Max(sums.max_a, size_a);
  sums.max_b = hn::Max(sums.max_b, size_b);
  sums.squared_difference = hn::MulAdd(difference, difference, sums.squared_difference);
  sums.squared_a = hn::MulAdd(a, a, sums.squared_a);
  sums.squared_b = hn::MulAdd(b, b, sums.squared_b);
  sums.product = hn::MulAdd(a, b, sums.product);
}

double sum_lanes(D d, V v) {
  HWY_ALIGN std::array<double, kMaxLanes> lanes{};
  hn::Store(v, d, lanes.data());
  double sum = 0;
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) sum += lanes[i];
  return sum;
}

double max_lanes(D d, V v) {
  HWY_ALIGN std::array<double, kMaxLanes> lanes{};
  hn::Store(v, d, lanes.data());
  return *std::max_element(lanes.begin(),
                           lanes.begin() + static_cast<std::ptrdiff_t>(hn::Lanes(d)));
}

template <class T>
BlockDifference measure(const T* a, const T* b, std::size_t count, UlpSpacing spacing) {
  const D d;
  const std::size_t lanes = hn::Lanes(d);
  const V smallest_power = hn::Set(d, std::ldexp(1.0, spacing.min_exponent));
  const V zero = hn::Zero(d);
  Sums sums{zero, zero, zero, zero, zero, zero, zero, zero};
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes)
    add(d, sums, load(d, a + i), load(d, b + i), smallest_power);
  if (i < count) {  // zeros add nothing
    std::array<T, kMaxLanes> last_a{};
    std::array<T, kMaxLanes> last_b{};
    std::copy(a + i, a + count, last_a.begin());
    std::copy(b + i, b + count, last_b.begin());
    add(d, sums, load(d, last_a.data()), load(d, last_b.data()), smallest_power);
  }
  return {max_lanes(d, sums.max_difference),
          max_lanes(d, sums.max_a),
          max_lanes(d, sums.max_b),
          std::ldexp(max_lanes(d, sums.max_scaled), spacing.mantissa_bits),
          sum_lanes(d, sums.squared_difference),
          sum_lanes(d, sums.squared_a),
          sum_lanes(d, sums.squared_b),
          sum_lanes(d, sums.product)};
}

BlockDifference measure_floats(const float* a, const float* b, std::size_t count,
                               UlpSpacing spacing) {
  return measure(a, b, count, spacing);
}

BlockDifference measure_doubles(const double* a, const double* b, std::size_t count,
                                UlpSpacing spacing) {
  return measure(a, b, count, spacing);
}

}  // namespace
}  // namespace hsdp::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace hsdp {

HWY_EXPORT(measure_floats);
HWY_EXPORT(measure_doubles);

BlockDifference block_difference(const float* a, const float* b, std::size_t count,
                                 UlpSpacing spacing) {
  return HWY_DYNAMIC_DISPATCH(measure_floats)(a, b, count, spacing);
}

BlockDifference block_difference(const double* a, const double* b, std::size_t count,
                                 UlpSpacing spacing) {
  return HWY_DYNAMIC_DISPATCH(measure_doubles)(a, b, count, spacing);
}

}  // namespace hsdp
#endif  // HWY_ONCE
