// The functions of dtype.h on whole vectors, for the SIMD target under compilation.
// foreach_target.h includes it once per target, hence the toggled guard.
#if defined(HSDP_KERNELS_VECTOR_ROUNDING_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HSDP_KERNELS_VECTOR_ROUNDING_H_
#undef HSDP_KERNELS_VECTOR_ROUNDING_H_
#else
#define HSDP_KERNELS_VECTOR_ROUNDING_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace hsdp::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU = hn::RebindToUnsigned<DF>;
using DI = hn::RebindToSigned<DF>;
using DU16 = hn::ScalableTag<std::uint16_t>;  // a full vector: two vectors of DF
using DI16 = hn::RebindToSigned<DU16>;
using DH = hn::Rebind<std::uint16_t, DF>;  // as many lanes as DF
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;
using VU16 = hn::Vec<DU16>;
using VI = hn::Vec<DI>;
using VI16 = hn::Vec<DI16>;
using VH = hn::Vec<DH>;

// The conversion instructions of AVX2 machines round to nearest even and keep subnormals. Other
// targets take the integer path, since Highway's emulation truncates in some versions.
#undef HSDP_NATIVE_F16
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
#define HSDP_NATIVE_F16 1
#else
#define HSDP_NATIVE_F16 0
#endif

HWY_INLINE VF decode_bf16(VH bits) {
  return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), bits)));
}

HWY_INLINE VF decode_f16(VH bits) {
#if HSDP_NATIVE_F16
  return hn::PromoteTo(DF(), hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits));
#else
  const DU du;
  const VU wide = hn::PromoteTo(du, bits);
  const VU sign = hn::ShiftLeft<16>(hn::And(wide, hn::Set(du, 0x8000U)));
  const VU shifted = hn::ShiftLeft<13>(hn::And(wide, hn::Set(du, 0x7fffU)));
  // Rebasing the exponent by a multiplication is exact and turns subnormals into normal numbers.
  const VF rebased = hn::Mul(hn::BitCast(DF(), shifted), hn::Set(DF(), 0x1p112F));
  const auto special = hn::Ge(rebased, hn::Set(DF(), 65536.0F));
  const VF infinite = hn::BitCast(DF(), hn::Or(shifted, hn::Set(du, 0x7f800000U)));
  return hn::Or(hn::IfThenElse(special, infinite, rebased), hn::BitCast(DF(), sign));
#endif
}

// The bf16 bits of each lane, in its upper half; the lower half is not cleared. Not for NaN.
HWY_INLINE VU rounded_bf16_number(VF value) {
  const DU du;
  const VU bits = hn::BitCast(du, value);
  const VU even = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1U));
  return hn::Add(hn::Add(bits, hn::Set(du, 0x7fffU)), even);
}

// Like rounded_bf16_number(), but for any value.
HWY_INLINE VU rounded_bf16_bits(VF value) {
  const DU du;
  const VU bits = hn::BitCast(du, value);
  const VU rounded = rounded_bf16_number(value);
  const VU quiet = hn::Or(bits, hn::Set(du, 0x400000U));
  const VF chosen =
      hn::IfThenElse(hn::IsNaN(value), hn::BitCast(DF(), quiet), hn::BitCast(DF(), rounded));
  return hn::BitCast(du, chosen);
}

HWY_INLINE VH encode_bf16(VF value) {
  return hn::TruncateTo(DH(), hn::ShiftRight<16>(rounded_bf16_bits(value)));
}

HWY_INLINE VF round_bf16(VF value) {
  return hn::BitCast(DF(), hn::And(rounded_bf16_bits(value), hn::Set(DU(), 0xffff0000U)));
}

HWY_INLINE VH encode_f16(VF value) {
#if HSDP_NATIVE_F16
  return hn::BitCast(DH(), hn::DemoteTo(hn::Rebind<hwy::float16_t, DF>(), value));
#else
  const DU du;
  const DI di;
  const VU bits = hn::BitCast(du, value);
  const VU magnitude = hn::And(bits, hn::Set(du, 0x7fffffffU));
  const auto below = [&](std::uint32_t limit) HWY_ATTR {  // signed compares: the sign bit is clear
    return hn::RebindMask(
        du, hn::Lt(hn::BitCast(di, magnitude), hn::Set(di, static_cast<std::int32_t>(limit))));
  };
  const VU rebased = hn::Sub(magnitude, hn::Set(du, 112U << 23));
  const VU even = hn::And(hn::ShiftRight<13>(rebased), hn::Set(du, 1U));
  const VU normal = hn::ShiftRight<13>(hn::Add(rebased, hn::Add(even, hn::Set(du, 0xfffU))));
  // Near 0.5 the unit in the last place is 2^-24, the smallest f16: the addition rounds.
  const VF half = hn::Set(DF(), 0.5F);
  const VU subnormal =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(DF(), magnitude), half)), hn::BitCast(du, half));
  VU result = hn::IfThenElse(below(0x38800000U), subnormal, normal);
  result = hn::IfThenElse(below(0x477ff000U), result, hn::Set(du, 0x7c00U));
  result = hn::IfThenElse(below(0x7f800001U), result, hn::Set(du, 0x7e00U));
  const VU sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000U));
  return hn::TruncateTo(DH(), hn::Or(result, sign));
#endif
}

HWY_INLINE VF round_f16(VF value) { return decode_f16(encode_f16(value)); }

#endif  // a target with vectors

}  // namespace HWY_NAMESPACE
}  // namespace hsdp::kernels
HWY_AFTER_NAMESPACE();

#endif  // guard toggled per target
