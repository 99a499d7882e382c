#include <cstddef>
#include <cstdint>

// First of the Highway headers.
#include "hsdp/kernels/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/dequantize_simd.cpp"
// clang-format off
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// clang-format on
#include <hwy/cache_control.h>

#include "hsdp/kernels/float_environment.h"
#include "hsdp/kernels/simd_dispatch.h"
#include "quant/group_arithmetic.h"
#include "quant/quantize_kernels.h"
#include "quant/quantize_tile.h"
#include "quant/simd_codes.h"

HWY_BEFORE_NAMESPACE();
namespace hsdp::quant {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128

bool dequantize_tiles(const Dequantize& args) { return dequantize_scalar(args); }

#else

constexpr std::size_t kAheadElements = 1024;

// Of one message, whose values are finite where its scales are.
template <Code kCode>
HWY_INLINE bool dequantize_whole(const Dequantize& args, const GroupTile& tile,
                                 const WholeGroups& groups) {
  const auto size = static_cast<std::size_t>(args.group_size);
  const TileGroup first = group_of(tile, args.group_size, groups.first);
  const TilePlace place = place_of(args.in.first, tile);
  const std::byte* codes = place.codes_of(first.number);
  const std::byte* const scales = place.scale_of(first.number);
  float* to = args.values + (tile.element - args.begin) + groups.begin;
  bool marked = false;
  for (std::size_t g = 0; g < groups.count(); ++g) {
    const float scale = load_scale(scales, g, args.in.first.format.scale_dtype);
    marked |= magnitude_bits(scale) >= kInfinityBits;
    const typename Codes<kCode>::Decoder decoder(scale);
    for (std::size_t i = 0; i < size;
         i += kChunk, codes += Codes<kCode>::kChunkBytes, to += kChunk) {
      hwy::Prefetch(to + kAheadElements);
      hwy::Prefetch(to + kAheadElements + 16);
      VF values[kVectors];
      decoder.load(codes, values);
      decoder.put_in_order(values);
      for (std::size_t k = 0; k < kVectors; ++k) hn::StoreU(values[k], DF(), to + k * kLanes);
    }
  }
  return marked;
}

// Of several, whose sum may be infinite where no group is marked.
template <Code kCode>
HWY_INLINE bool sum_whole(const Dequantize& args, const GroupTile& tile,
                          const WholeGroups& groups) {
  const auto size = static_cast<std::size_t>(args.group_size);
  const FromReceived<kCode> source(args.in, tile, groups);
  float* to = args.values + (tile.element - args.begin) + groups.begin;
  VI largest = hn::Zero(DI());
  for (std::size_t g = 0; g < groups.count(); ++g, to += size) {
    Top top;
    source.each_chunk(g, size, [&](std::size_t i, VF(&values)[kVectors]) HWY_ATTR {
      top.take(values);
      for (std::size_t k = 0; k < kVectors; ++k) {
        hn::StoreU(values[k], DF(), to + i + k * kLanes);
      }
    });
    largest = hn::Max(largest, hn::Max(top.largest[0], top.largest[1]));
  }
  return largest_lane(largest) >= kInfinityBits;
}

HWY_INLINE bool widen_whole(const Dequantize& args, const GroupTile& tile,
                            const WholeGroups& groups) {
  const std::size_t count = groups.count() * static_cast<std::size_t>(args.group_size);
  const TileGroup first = group_of(tile, args.group_size, groups.first);
  const auto* const from =
      reinterpret_cast<const std::uint16_t*>(place_of(args.in.first, tile).codes_of(first.number));
  float* const to = args.values + (tile.element - args.begin) + groups.begin;
  VI largest = hn::Zero(DI());
  for (std::size_t i = 0; i < count; i += kLanes) {
    const VF value = simd::decode_bf16(hn::LoadU(simd::DH(), from + i));
    largest = hn::Max(largest, magnitudes_of(value));
    hn::StoreU(value, DF(), to + i);
  }
  return largest_lane(largest) >= kInfinityBits;
}

bool dequantize_tiles(const Dequantize& args) {
  bool marked = false;
  const Code code = args.in.first.format.code;
  const bool sums = args.in.count > 1;
  for (const GroupTile& tile : args.tiles) {
    const WholeGroups groups(tile, args.group_size);
    for (std::int32_t g = 0; g < groups.all; ++g) {
      if (g != groups.first || groups.count() == 0) {
        marked |= dequantize_group(args, tile, group_of(tile, args.group_size, g));
        continue;
      }
      if (code == Code::kBf16) {
        marked |= widen_whole(args, tile, groups);
      } else if (code == Code::kInt4) {
        marked |= sums ? sum_whole<Code::kInt4>(args, tile, groups)
                       : dequantize_whole<Code::kInt4>(args, tile, groups);
      } else {
        marked |= sums ? sum_whole<Code::kInt8>(args, tile, groups)
                       : dequantize_whole<Code::kInt8>(args, tile, groups);
      }
      g = groups.end - 1;
    }
  }
  return marked;
}

#endif  // a target with vectors

}  // namespace HWY_NAMESPACE
}  // namespace hsdp::quant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace hsdp::quant {

HWY_EXPORT(dequantize_tiles);

bool dequantize_simd(const Dequantize& args) {
  const kernels::DefaultFloatEnvironment environment;
  if (kernels::simd_choice().scalar) return dequantize_scalar(args);
  return HSDP_SIMD_DISPATCH(dequantize_tiles)(args);
}

}  // namespace hsdp::quant

#endif  // HWY_ONCE
