// Loads vectors from rows and stores them to outputs of any dtype, for the SIMD target under
// compilation. foreach_target.h includes it once per target, hence the toggled guard.
#if defined(HSDP_KERNELS_VECTOR_CODEC_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HSDP_KERNELS_VECTOR_CODEC_H_
#undef HSDP_KERNELS_VECTOR_CODEC_H_
#else
#define HSDP_KERNELS_VECTOR_CODEC_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hsdp/kernels/vector_rounding.h"

HWY_BEFORE_NAMESPACE();
namespace hsdp::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

// Loads an fp32 vector at element `i` of a row at any address.
struct LoadF32 {
  static constexpr std::size_t kElementBytes = 4;
  static HWY_INLINE VF load(const void* row, std::size_t i, VF /*scale*/) {
    return hn::LoadU(DF(), static_cast<const float*>(row) + i);
  }
};
struct LoadBf16 {
  static constexpr std::size_t kElementBytes = 2;
  static HWY_INLINE VF load(const void* row, std::size_t i, VF /*scale*/) {
    return decode_bf16(hn::LoadU(DH(), static_cast<const std::uint16_t*>(row) + i));
  }
};
struct LoadF16 {
  static constexpr std::size_t kElementBytes = 2;
  static HWY_INLINE VF load(const void* row, std::size_t i, VF /*scale*/) {
    return decode_f16(hn::LoadU(DH(), static_cast<const std::uint16_t*>(row) + i));
  }
};
struct LoadSentBf16 {
  static constexpr std::size_t kElementBytes = 4;
  static HWY_INLINE VF load(const void* row, std::size_t i, VF scale) {
    return round_bf16(hn::Mul(LoadF32::load(row, i, scale), scale));
  }
};
struct LoadSentF16 {
  static constexpr std::size_t kElementBytes = 4;
  static HWY_INLINE VF load(const void* row, std::size_t i, VF scale) {
    return round_f16(hn::Mul(LoadF32::load(row, i, scale), scale));
  }
};

#if HWY_ARCH_X86
// Undoes the order of a pack of two vectors within 128-bit blocks, in pairs of 16-bit lanes.
HWY_INLINE auto pack_order() {
  constexpr std::size_t kLanes = hn::MaxLanes(DU());
  alignas(64) std::uint32_t order[kLanes];
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const std::size_t half = lane % (kLanes / 2);
    order[lane] = static_cast<std::uint32_t>(half / 2 * 4 + half % 2 + lane / (kLanes / 2) * 2);
  }
  return hn::SetTableIndices(DU(), order);
}
#endif

// encode() takes any value; encode_numbers() takes two vectors without NaN, in order.
struct EncodeBf16 {
  static HWY_INLINE VH encode(VF value) { return encode_bf16(value); }
  static HWY_INLINE VU16 encode_numbers(VF low, VF high) {
#if HWY_ARCH_X86
    // Sign-extended halves survive the signed pack, which works within 128-bit blocks.
    const VI16 packed = hn::ReorderDemote2To(
        DI16(), hn::ShiftRight<16>(hn::BitCast(DI(), rounded_bf16_number(low))),
        hn::ShiftRight<16>(hn::BitCast(DI(), rounded_bf16_number(high))));
    if (hn::MaxLanes(DF()) == 4) return hn::BitCast(DU16(), packed);
    return hn::BitCast(DU16(), hn::TableLookupLanes(hn::BitCast(DU(), packed), pack_order()));
#else
    return hn::Combine(DU16(), encode_bf16(high), encode_bf16(low));
#endif
  }
};
struct EncodeF16 {
  static HWY_INLINE VH encode(VF value) { return encode_f16(value); }
  static HWY_INLINE VU16 encode_numbers(VF low, VF high) {
    return hn::Combine(DU16(), encode_f16(high), encode_f16(low));
  }
};

#endif  // a target with vectors

}  // namespace HWY_NAMESPACE
}  // namespace hsdp::kernels
HWY_AFTER_NAMESPACE();

#endif  // guard toggled per target
