// Codes of whole groups as vectors: loads, stores and sums them, for the SIMD target under
// compilation. foreach_target.h includes it once per target, hence the toggled guard.
#if defined(HSDP_QUANT_SIMD_CODES_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HSDP_QUANT_SIMD_CODES_H_
#undef HSDP_QUANT_SIMD_CODES_H_
#else
#define HSDP_QUANT_SIMD_CODES_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hsdp/kernels/vector_codec.h"
#include "quant/group_arithmetic.h"
#include "quant/quantize_tile.h"

HWY_BEFORE_NAMESPACE();
namespace hsdp::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;

using simd::DF;
using simd::DI;
using simd::DU;
using simd::VF;
using simd::VI;
using simd::VU;
using DI8 = hn::Rebind<std::int8_t, DF>;  // as many lanes as DF
using DU8 = hn::Rebind<std::uint8_t, DF>;

constexpr std::size_t kLanes = hn::MaxLanes(DF());
// Every group size is a multiple of it; its vectors give the loops independent work.
constexpr std::size_t kChunk = 32;
constexpr std::size_t kVectors = kChunk / kLanes;

// The whole groups of a tile, which has at most one short group before and one after them.
struct WholeGroups {
  WholeGroups(const GroupTile& tile, int group_size)
      : all(group_count(tile, group_size)), first(0), end(all) {
    if (group_of(tile, group_size, 0).count < group_size) first = 1;
    if (end > first && group_of(tile, group_size, end - 1).count < group_size) --end;
    begin = first < all ? group_of(tile, group_size, first).begin : 0;
  }
  [[nodiscard]] std::size_t count() const { return static_cast<std::size_t>(end - first); }

  std::int32_t all;
  std::int32_t first;
  std::int32_t end;
  std::int32_t begin = 0;  // first element, in the tile
};

HWY_INLINE VF decoded_vector(VI codes, VF scale) {
  return hn::Mul(hn::ConvertTo(DF(), codes), scale);
}

HWY_INLINE VI load_int8(const std::int8_t* codes) {
  return hn::PromoteTo(DI(), hn::LoadU(DI8(), codes));
}

// Loads kLanes bytes, one per lane, in an order from which InterleaveLower and InterleaveUpper,
// which work within blocks of four lanes, make vectors of consecutive elements.
HWY_INLINE VU load_pairs(const std::uint8_t* codes) {
  auto bytes = hn::LoadU(DU8(), codes);
  if constexpr (kLanes > 4) {
    constexpr std::size_t kHalf = kLanes / 2;
    alignas(16) std::uint8_t order[kLanes];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      order[lane] = static_cast<std::uint8_t>(lane / 4 * 2 + lane % 2 + (lane % 4 < 2 ? 0 : kHalf));
    }
    bytes = hn::TableLookupBytes(bytes, hn::Load(DU8(), order));
  }
  return hn::PromoteTo(DU(), bytes);
}

// A value rounded to an integer, by adding a float whose last place is worth 1: the low byte is the
// code, in two's complement.
struct Rounded {
  explicit HWY_INLINE Rounded(VF value) : sum(hn::Add(value, hn::Set(DF(), kUnitIsOne))) {}
  [[nodiscard]] HWY_INLINE VF number() const { return hn::Sub(sum, hn::Set(DF(), kUnitIsOne)); }
  [[nodiscard]] HWY_INLINE VU bits() const { return hn::BitCast(DU(), sum); }
  VF sum;
};

HWY_INLINE void store_int8(VU bits, std::uint8_t* to) {
  hn::StoreU(hn::TruncateTo(DU8(), bits), DU8(), to);
}

// Stores 2 kLanes codes in kLanes bytes.
HWY_INLINE void store_int4(VU low, VU high, std::uint8_t* to) {
  const VU even = hn::ConcatEven(DU(), high, low);
  const VU odd = hn::ConcatOdd(DU(), high, low);
  const VU pairs = hn::Add(hn::Add(even, hn::ShiftLeft<4>(odd)), hn::Set(DU(), 8 * 17));
  hn::StoreU(hn::TruncateTo(DU8(), pairs), DU8(), to);
}

template <Code kCode>
struct Codes;
template <>
struct Codes<Code::kInt4> {
  static constexpr std::size_t kChunkBytes = kChunk / 2;
  // Decodes the codes of a group. With 16 lanes, one vector holds the values of all 4-bit codes.
  struct Decoder {
    explicit HWY_INLINE Decoder(float scale) : by(hn::Set(DF(), scale)) {
      if constexpr (kLanes == 16) by = hn::Mul(hn::Iota(DF(), -8.0F), by);
    }
    // Keeps even and odd elements apart, so that rows are added before they are reordered.
    HWY_INLINE void load(const std::byte* chunk, VF (&values)[kVectors]) const {
      const auto* const from = reinterpret_cast<const std::uint8_t*>(chunk);
      for (std::size_t k = 0; k < kVectors; k += 2) {
        const VU pairs = load_pairs(from + k * kLanes / 2);
        values[k] = decode(hn::And(pairs, hn::Set(DU(), 15)));
        values[k + 1] = decode(hn::ShiftRight<4>(pairs));
      }
    }
    static HWY_INLINE void put_in_order(VF (&values)[kVectors]) {
      for (std::size_t k = 0; k < kVectors; k += 2) {
        const VF even = values[k];
        values[k] = hn::InterleaveLower(DF(), even, values[k + 1]);
        values[k + 1] = hn::InterleaveUpper(DF(), even, values[k + 1]);
      }
    }
    HWY_INLINE VF decode(VU halves) const {
      if constexpr (kLanes == 16) {
        return hn::TableLookupLanes(by, hn::IndicesFromVec(DF(), halves));
      } else {
        return decoded_vector(hn::Sub(hn::BitCast(DI(), halves), hn::Set(DI(), 8)), by);
      }
    }
    VF by;
  };
  static HWY_INLINE void store(const VU (&bits)[kVectors], std::byte* chunk) {
    auto* const to = reinterpret_cast<std::uint8_t*>(chunk);
    for (std::size_t k = 0; k < kVectors; k += 2) {
      store_int4(bits[k], bits[k + 1], to + k * kLanes / 2);
    }
  }
};
template <>
struct Codes<Code::kInt8> {
  static constexpr std::size_t kChunkBytes = kChunk;
  struct Decoder {
    explicit HWY_INLINE Decoder(float scale) : by(hn::Set(DF(), scale)) {}
    HWY_INLINE void load(const std::byte* chunk, VF (&values)[kVectors]) const {
      const auto* const from = reinterpret_cast<const std::int8_t*>(chunk);
      for (std::size_t k = 0; k < kVectors; ++k) {
        values[k] = decoded_vector(load_int8(from + k * kLanes), by);
      }
    }
    static HWY_INLINE void put_in_order(VF (&/*values*/)[kVectors]) {}
    VF by;
  };
  static HWY_INLINE void store(const VU (&bits)[kVectors], std::byte* chunk) {
    auto* const to = reinterpret_cast<std::uint8_t*>(chunk);
    for (std::size_t k = 0; k < kVectors; ++k) store_int8(bits[k], to + k * kLanes);
  }
};

HWY_INLINE float load_scale(const std::byte* scales, std::size_t group, Dtype dtype) {
  return kernels::decode(scales, static_cast<std::int64_t>(group), dtype);
}

HWY_INLINE std::uint32_t largest_lane(VI magnitudes) {
  return static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(DI(), magnitudes)));
}

HWY_INLINE VI magnitudes_of(VF values) {
  return hn::And(hn::BitCast(DI(), values), hn::Set(DI(), 0x7fffffff));
}

using D4 = hn::CappedTag<std::int32_t, 4>;
using V4 = hn::Vec<D4>;

HWY_INLINE V4 four_lanes(V4 vector) { return vector; }
template <class V>
HWY_INLINE V4 four_lanes(V vector) {
  const hn::Half<hn::DFromV<V> > half;
  return four_lanes(hn::Max(hn::LowerHalf(half, vector), hn::UpperHalf(half, vector)));
}

// The largest magnitude of the values that it takes, by lane. store() leaves four parts.
struct Top {
  HWY_INLINE Top() { largest[0] = largest[1] = hn::Zero(DI()); }
  HWY_INLINE void take(const VF (&values)[kVectors]) {
    for (std::size_t k = 0; k < kVectors; ++k) {
      largest[k % 2] = hn::Max(largest[k % 2], magnitudes_of(values[k]));
    }
  }
  HWY_INLINE void store(std::int32_t* parts) const {
    hn::Store(four_lanes(hn::Max(largest[0], largest[1])), D4(), parts);
  }
  VI largest[2];
};

template <Code kCode>
struct FromReceived {
  using Decoder = typename Codes<kCode>::Decoder;

  FromReceived(const Quantize& args, const GroupTile& tile, const WholeGroups& groups)
      : FromReceived(args.received, tile, groups) {}
  FromReceived(const ReceivedMessages& received, const GroupTile& tile, const WholeGroups& groups)
      : count(static_cast<std::size_t>(received.count)),
        distance(static_cast<std::size_t>(received.distance)),
        scale_dtype(received.first.format.scale_dtype) {
    const TileGroup first = group_of(tile, received.first.format.group_size, groups.first);
    const TilePlace place = place_of(received.first, tile);
    codes = place.codes_of(first.number);
    scales = place.scale_of(first.number);
  }
  template <class Visit>
  HWY_INLINE void each_chunk(std::size_t group, std::size_t size, const Visit& visit) const {
    const std::size_t begin = group * size / kChunk * Codes<kCode>::kChunkBytes;
    for (std::size_t i = 0; i < size; i += kChunk) {
      const std::byte* row = codes + begin + i / kChunk * Codes<kCode>::kChunkBytes;
      const std::byte* row_scales = scales;
      VF h[kVectors];
      Decoder(load_scale(row_scales, group, scale_dtype)).load(row, h);
      for (std::size_t r = 1; r < count; ++r) {
        row += distance;
        row_scales += distance;
        VF more[kVectors];
        Decoder(load_scale(row_scales, group, scale_dtype)).load(row, more);
        for (std::size_t k = 0; k < kVectors; ++k) h[k] = hn::Add(h[k], more[k]);
      }
      Decoder::put_in_order(h);
      visit(i, h);
    }
  }
  HWY_INLINE void prefetch(std::size_t /*i*/) const {}
  std::size_t count;
  std::size_t distance;
  Dtype scale_dtype;
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
};

#endif  // a target with vectors

}  // namespace HWY_NAMESPACE
}  // namespace hsdp::quant
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
