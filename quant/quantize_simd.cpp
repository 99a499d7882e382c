#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// First of the Highway headers.
#include "hsdp/kernels/highway_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quant/quantize_simd.cpp"
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

bool quantize_tiles(const Quantize& args) { return quantize_scalar(args); }

#else

constexpr std::size_t kBatchElements = 1024;  // or one group, if that is larger
constexpr std::size_t kMostGroups = kBatchElements / kLeastGroupSize;

// The groups that pass through the phases together [Note: quantizing in batches].
struct Batch {
  std::size_t first = 0;  // index among the tile's whole groups
  std::size_t count = 0;
  std::size_t size = 0;  // elements of a group

  alignas(64) float h[kMostGroupSize];  // later the new errors
  alignas(64) float e[kMostGroupSize];
  // The largest magnitude of every group, as bits: in four parts, and overall.
  alignas(64) std::int32_t part_tops[kMostGroups][4];
  alignas(64) std::uint32_t tops[kMostGroups];
  alignas(64) float scales[kMostGroups];
  alignas(64) float lifts[kMostGroups];
  alignas(64) float inverses[kMostGroups];
};

HWY_INLINE void store_scales(const float* scales, std::size_t count, std::byte* to, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    std::memcpy(to, scales, 4 * count);
    return;
  }
  for (std::size_t g = 0; g < count; ++g) {
    const auto bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(scales[g]) >> 16);
    std::memcpy(to + 2 * g, &bits, 2);
  }
}

// ---- errors ------------------------------------------------------------------------------------

// Error states, starting at the first whole group of a tile.
struct NoError {
  static constexpr bool kExists = false;
  NoError(const ErrorState& /*state*/, const GroupTile& /*tile*/, const WholeGroups& /*groups*/) {}
  struct OfGroup {};
  HWY_INLINE void prefetch(std::size_t /*i*/) const {}
  HWY_INLINE OfGroup of(std::size_t /*group*/, std::size_t /*size*/) const { return {}; }
};
struct Int8Error {
  static constexpr bool kExists = true;
  Int8Error(const ErrorState& state, const GroupTile& tile, const WholeGroups& groups)
      : codes(state.codes + (tile.position - state.position) + groups.begin),
        scales(state.scales + (tile.group - state.group) + groups.first) {}
  struct OfGroup {
    const std::int8_t* codes;
    VF scale;
    HWY_INLINE VF load(std::size_t i) const { return decoded_vector(load_int8(codes + i), scale); }
  };
  HWY_INLINE OfGroup of(std::size_t group, std::size_t size) const {
    return {codes + group * size, hn::Set(DF(), scales[group])};
  }
  HWY_INLINE void prefetch(std::size_t i) const { hwy::Prefetch(codes + i); }
  std::int8_t* codes;
  float* scales;
};
struct F32Error {
  static constexpr bool kExists = true;
  F32Error(const ErrorState& state, const GroupTile& tile, const WholeGroups& groups)
      : values(state.values + (tile.position - state.position) + groups.begin) {}
  struct OfGroup {
    const float* values;
    HWY_INLINE VF load(std::size_t i) const { return hn::LoadU(DF(), values + i); }
  };
  HWY_INLINE OfGroup of(std::size_t group, std::size_t size) const {
    return {values + group * size};
  }
  HWY_INLINE void prefetch(std::size_t i) const {
    hwy::Prefetch(values + i);
    hwy::Prefetch(values + i + 16);
  }
  float* values;
};

// ---- what is quantized -------------------------------------------------------------------------

struct FromValues {
  FromValues(const Quantize& args, const GroupTile& tile, const WholeGroups& groups)
      : values(args.values + tile.element + groups.begin), factor(hn::Set(DF(), args.factor)) {}
  template <class Visit>
  HWY_INLINE void each_chunk(std::size_t group, std::size_t size, const Visit& visit) const {
    const float* const from = values + group * size;
    for (std::size_t i = 0; i < size; i += kChunk) {
      VF h[kVectors];
      for (std::size_t k = 0; k < kVectors; ++k) {
        h[k] = hn::Mul(hn::LoadU(DF(), from + i + k * kLanes), factor);
      }
      visit(i, h);
    }
  }
  HWY_INLINE void prefetch(std::size_t i) const {
    hwy::Prefetch(values + i);
    hwy::Prefetch(values + i + 16);
  }
  const float* values;
  VF factor;
};

// ---- phases of a batch -------------------------------------------------------------------------

using D2 = hn::CappedTag<std::int64_t, 2>;

// Joins the parts of four groups at once: group by group that would cost as much as everything
// else.
HWY_INLINE void gather_tops(Batch& batch) {
  const D4 d;
  std::size_t end = batch.count;  // whole vectors, for scale_groups()
  for (; end % kLanes != 0; ++end) {
    hn::Store(hn::Load(d, batch.part_tops[0]), d, batch.part_tops[end]);
  }
  for (std::size_t g = 0; g < end; g += 4) {
    const V4 a = hn::Load(d, batch.part_tops[g]);
    const V4 b = hn::Load(d, batch.part_tops[g + 1]);
    const V4 c = hn::Load(d, batch.part_tops[g + 2]);
    const V4 e = hn::Load(d, batch.part_tops[g + 3]);
    const auto ab =
        hn::BitCast(D2(), hn::Max(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
    const auto ce =
        hn::BitCast(D2(), hn::Max(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e)));
    const V4 all = hn::Max(hn::BitCast(d, hn::InterleaveLower(D2(), ab, ce)),
                           hn::BitCast(d, hn::InterleaveUpper(D2(), ab, ce)));
    hn::Store(all, d, reinterpret_cast<std::int32_t*>(batch.tops) + g);
  }
}

// Reads h of every group, keeps its error apart, and finds the largest magnitude.
template <class Source, class Error>
HWY_INLINE void read_groups(const Source& source, const Error& before, Batch& batch) {
  for (std::size_t g = 0; g < batch.count; ++g) {
    float* const h = batch.h + g * batch.size;
    float* const e = batch.e + g * batch.size;
    Top top;
    const auto error = before.of(batch.first + g, batch.size);
    const auto take = [&](std::size_t i, VF(&value)[kVectors]) HWY_ATTR {
      if constexpr (Error::kExists) {
        for (std::size_t k = 0; k < kVectors; ++k) {
          const VF one = error.load(i + k * kLanes);
          hn::Store(one, DF(), e + i + k * kLanes);
          value[k] = hn::Add(value[k], one);
        }
      }
      top.take(value);
      for (std::size_t k = 0; k < kVectors; ++k) hn::Store(value[k], DF(), h + i + k * kLanes);
    };
    source.each_chunk(batch.first + g, batch.size, take);
    top.store(batch.part_tops[g]);
  }
}

struct Found {
  bool marked = false;
  bool lifted = false;
};

// scaling_of() for every group. The h of a marked group becomes zero, and so do its codes.
HWY_INLINE Found scale_groups(const ScalingRule& rule, Batch& batch) {
  const DF df;
  gather_tops(batch);
  const VF levels = hn::Set(df, rule.levels);
  const VF most = hn::Set(df, rule.most);
  VI largest = hn::Zero(DI());
  VF least = hn::Set(df, 1.0F);
  for (std::size_t g = 0; g < batch.count; g += kLanes) {
    const VI bits = hn::Load(DI(), reinterpret_cast<const std::int32_t*>(batch.tops) + g);
    largest = hn::Max(largest, bits);
    const VF top = hn::BitCast(df, bits);
    least = hn::Min(least, top);
    const VF lift =
        hn::IfThenElse(hn::Lt(top, hn::Set(df, kTiny)), hn::Set(df, kLift), hn::Set(df, 1.0F));
    VF scale = hn::Min(hn::Div(top, levels), most);
    VF inverse;
    if (rule.to_bf16) {
      const VU raised = hn::Add(hn::BitCast(DU(), scale), hn::Set(DU(), 0xffffU));
      scale = hn::Min(hn::BitCast(df, hn::And(raised, hn::Set(DU(), 0xffff0000U))), most);
      inverse = hn::IfThenZeroElse(hn::Eq(scale, hn::Zero(df)),
                                   hn::Div(hn::Set(df, 1.0F), hn::Mul(scale, lift)));
    } else {
      inverse = hn::IfThenZeroElse(hn::Eq(top, hn::Zero(df)), hn::Div(levels, hn::Mul(top, lift)));
    }
    hn::Store(lift, df, batch.lifts + g);
    hn::Store(scale, df, batch.scales + g);
    hn::Store(inverse, df, batch.inverses + g);
  }
  Found found;
  found.lifted = !hn::AllTrue(df, hn::Ge(least, hn::Set(df, kTiny)));
  found.marked = largest_lane(largest) >= kInfinityBits;
  if (HWY_LIKELY(!found.marked)) return found;
  for (std::size_t g = 0; g < batch.count; ++g) {
    if (batch.tops[g] < kInfinityBits) continue;
    batch.scales[g] = std::bit_cast<float>(kMarkBits);
    batch.lifts[g] = 1.0F;
    batch.inverses[g] = 0.0F;
    std::memset(batch.h + g * batch.size, 0, batch.size * sizeof(float));
  }
  return found;
}

// Skips a factor of 1.
template <bool kLifted>
struct Scaling {
  Scaling(const Batch& batch, std::size_t group)
      : lift(hn::Set(DF(), batch.lifts[group])), inverse(hn::Set(DF(), batch.inverses[group])) {}
  HWY_INLINE VF apply(VF h) const {
    if constexpr (kLifted) h = hn::Mul(h, lift);
    return hn::Mul(h, inverse);
  }
  VF lift;
  VF inverse;
};

double sum_of(VF sums) {
  alignas(64) float lanes[kLanes];
  hn::Store(sums, DF(), lanes);
  double sum = 0.0;
  for (const float lane : lanes) sum += static_cast<double>(lane);
  return sum;
}

// What code_groups() writes besides the codes.
struct CodeSettings {
  float* errors = nullptr;  // starts at the batch's first group
  float beta = 0.0F;
  TileFigures* figures = nullptr;
};

// Writes codes, and new errors with their largest magnitudes. Returns the end of the codes.
template <Code kCode, class Error, bool kLifted, class Source>
HWY_INLINE std::byte* code_groups(const Source& source, const Error& before, const Error& after,
                                  const CodeSettings& to, std::byte* out, Batch& batch) {
  const VF keep = hn::Set(DF(), to.beta);
  const VF take = hn::Set(DF(), 1.0F - to.beta);
  for (std::size_t g = 0; g < batch.count; ++g) {
    const float* const h = batch.h + g * batch.size;
    const float* const e = batch.e + g * batch.size;
    float* const errors = to.errors + g * batch.size;
    const Scaling<kLifted> scaling(batch, g);
    const VF scale = hn::Set(DF(), batch.scales[g]);
    const bool counts = to.figures != nullptr && batch.tops[g] < kInfinityBits;
    VF missed = hn::Zero(DF());  // in units of the scale, so that squares stay within fp32
    VF wanted = hn::Zero(DF());
    Top top;
    for (std::size_t i = 0; i < batch.size; i += kChunk, out += Codes<kCode>::kChunkBytes) {
      VF value[kVectors];
      VF codes[kVectors];
      VU bits[kVectors];
      for (std::size_t k = 0; k < kVectors; ++k) {
        value[k] = hn::Load(DF(), h + i + k * kLanes);
        const VF scaled = scaling.apply(value[k]);
        const Rounded rounded(scaled);
        codes[k] = rounded.number();
        bits[k] = rounded.bits();
        if (HWY_LIKELY(!counts)) continue;
        const VF gap = hn::Sub(scaled, codes[k]);
        missed = hn::Add(missed, hn::Mul(gap, gap));
        wanted = hn::Add(wanted, hn::Mul(scaled, scaled));
      }
      source.prefetch((batch.first + batch.count + g) * batch.size + i);
      before.prefetch((batch.first + batch.count + g) * batch.size + i);
      after.prefetch((batch.first + batch.count + g) * batch.size + i);
      Codes<kCode>::store(bits, out);
      if constexpr (Error::kExists) {
        VF next[kVectors];
        for (std::size_t k = 0; k < kVectors; ++k) {
          const VF gap = hn::Sub(value[k], hn::Mul(codes[k], scale));
          const VF kept = hn::Mul(keep, hn::Load(DF(), e + i + k * kLanes));
          next[k] = hn::Add(kept, hn::Mul(take, gap));
          hn::StoreU(next[k], DF(), errors + i + k * kLanes);
        }
        if constexpr (std::is_same_v<Error, Int8Error>) top.take(next);
      }
    }
    if (HWY_UNLIKELY(counts)) {
      const double unit = static_cast<double>(batch.scales[g]) * batch.scales[g];
      to.figures->missed += unit * sum_of(missed);
      to.figures->wanted += unit * sum_of(wanted);
    }
    if constexpr (std::is_same_v<Error, Int8Error>) top.store(batch.part_tops[g]);
  }
  return out;
}

// The dithers of whole groups, 16 elements at a time; group sizes are multiples of 16.
void fill_dithers(const Dither& dither, const GroupTile& tile, std::int32_t begin,
                  std::size_t count, float* to) {
  for (std::size_t i = 0; i < count; i += kDitherElements) {
    const std::int64_t flat = tile.flat_offset + begin + static_cast<std::int64_t>(i);
    const PhiloxWords words = dither_words(dither, tile.parameter, flat);
    for (int k = 0; k < kDitherElements; ++k) {
      to[i + static_cast<std::size_t>(k)] = dither_of(words, k);
    }
  }
}

template <bool kLifted>
HWY_INLINE void code_errors(const Int8Error& after, const float* dithers, const Batch& batch) {
  for (std::size_t g = 0; g < batch.count; ++g) {
    const float* const errors = batch.h + g * batch.size;
    auto* const to = reinterpret_cast<std::uint8_t*>(after.codes + (batch.first + g) * batch.size);
    const Scaling<kLifted> scaling(batch, g);
    // A marked group stays zero. Its codes are not used, but are the same everywhere.
    const bool dithered = dithers != nullptr && batch.tops[g] < kInfinityBits;
    for (std::size_t i = 0; i < batch.size; i += kLanes) {
      VF scaled = scaling.apply(hn::Load(DF(), errors + i));
      if (dithered) {
        scaled = hn::Add(scaled, hn::Load(DF(), dithers + g * batch.size + i));
      }
      store_int8(Rounded(scaled).bits(), to + i);
    }
  }
}

void store_errors(const Int8Error& after, const Quantize& args, const GroupTile& tile,
                  std::int32_t begin, Batch& batch) {
  constexpr ScalingRule kRule = scaling_rule(Code::kInt8, Dtype::kF32);
  const Found found = scale_groups(kRule, batch);
  if (args.dither != nullptr) {
    alignas(64) float dithers[kMostGroupSize];
    fill_dithers(*args.dither, tile, begin, batch.count * batch.size, dithers);
    code_errors<true>(after, dithers, batch);
  } else if (HWY_UNLIKELY(found.lifted)) {
    code_errors<true>(after, nullptr, batch);
  } else {
    code_errors<false>(after, nullptr, batch);
  }
  std::memcpy(after.scales + batch.first, batch.scales, batch.count * sizeof(float));
}

template <Code kCode, class Source, class Error>
bool quantize_whole(const Quantize& args, const GroupTile& tile, const WholeGroups& groups,
                    TileFigures* figures) {
  const TileGroup first = group_of(tile, args.group_size, groups.first);
  const TilePlace to_place = place_of(args.out, tile);
  std::byte* codes = to_place.codes_of(first.number);
  std::byte* const scales = to_place.scale_of(first.number);
  const auto scale_size = static_cast<std::size_t>(scale_bytes(args.out.format));
  const ScalingRule rule = scaling_rule(kCode, args.out.format.scale_dtype);
  const Source source(args, tile, groups);
  const Error before(args.before, tile, groups);
  const Error after(args.after, tile, groups);
  Batch batch;
  batch.size = static_cast<std::size_t>(args.group_size);
  const std::size_t most = batch.size < kBatchElements ? kBatchElements / batch.size : 1;
  CodeSettings to{.beta = args.beta, .figures = figures};
  bool marked = false;
  for (; batch.first < groups.count(); batch.first += batch.count) {
    const std::size_t left = groups.count() - batch.first;
    batch.count = left < most ? left : most;
    if constexpr (std::is_same_v<Error, F32Error>) {
      to.errors = after.values + batch.first * batch.size;
    } else {
      to.errors = batch.h;
    }
    read_groups(source, before, batch);
    const Found found = scale_groups(rule, batch);
    marked |= found.marked;
    store_scales(batch.scales, batch.count, scales + batch.first * scale_size,
                 args.out.format.scale_dtype);
    codes = HWY_UNLIKELY(found.lifted)
                ? code_groups<kCode, Error, true>(source, before, after, to, codes, batch)
                : code_groups<kCode, Error, false>(source, before, after, to, codes, batch);
    if constexpr (std::is_same_v<Error, Int8Error>) {
      const std::size_t begin = batch.first * batch.size;
      store_errors(after, args, tile, groups.begin + static_cast<std::int32_t>(begin), batch);
    }
  }
  return marked;
}

template <Code kCode, class Source>
bool quantize_whole_of(const Quantize& args, const GroupTile& tile, const WholeGroups& groups,
                       TileFigures* figures) {
  if (args.before.codes != nullptr) {
    return quantize_whole<kCode, Source, Int8Error>(args, tile, groups, figures);
  }
  if (args.before.values != nullptr) {
    return quantize_whole<kCode, Source, F32Error>(args, tile, groups, figures);
  }
  return quantize_whole<kCode, Source, NoError>(args, tile, groups, figures);
}

// Rounds to bf16, each element independently.
template <class Source>
bool round_whole(const Quantize& args, const GroupTile& tile, const WholeGroups& groups,
                 TileFigures* figures) {
  const TileGroup first = group_of(tile, args.group_size, groups.first);
  auto* out = reinterpret_cast<std::uint16_t*>(place_of(args.out, tile).codes_of(first.number));
  const auto size = static_cast<std::size_t>(args.group_size);
  const Source source(args, tile, groups);
  VI largest = hn::Zero(DI());
  const auto store = [&](std::size_t /*i*/, VF(&value)[kVectors]) HWY_ATTR {
    for (std::size_t k = 0; k < kVectors; ++k, out += kLanes) {
      const auto bits = simd::encode_bf16(value[k]);
      hn::StoreU(bits, simd::DH(), out);
      largest = hn::Max(largest, magnitudes_of(simd::decode_bf16(bits)));
      if (HWY_LIKELY(figures == nullptr)) continue;
      alignas(64) float wanted[kLanes];
      hn::Store(value[k], DF(), wanted);
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const float sent = to_float(Bf16{out[lane]});
        if (magnitude_bits(sent) >= kInfinityBits) continue;
        const double missed = static_cast<double>(wanted[lane]) - sent;
        figures->missed += missed * missed;
        figures->wanted += static_cast<double>(wanted[lane]) * wanted[lane];
      }
    }
  };
  for (std::size_t g = 0; g < groups.count(); ++g) source.each_chunk(g, size, store);
  return largest_lane(largest) >= kInfinityBits;
}

using TileFunction = bool (*)(const Quantize&, const GroupTile&, const WholeGroups&, TileFigures*);

template <class Source>
TileFunction tile_function_of(Code code) {
  switch (code) {
    case Code::kInt4:
      return quantize_whole_of<Code::kInt4, Source>;
    case Code::kInt8:
      return quantize_whole_of<Code::kInt8, Source>;
    case Code::kBf16:
      return round_whole<Source>;
  }
  return nullptr;
}

TileFunction tile_function(const Quantize& args) {
  const Code code = args.out.format.code;
  if (args.values != nullptr) return tile_function_of<FromValues>(code);
  if (args.received.first.format.code == Code::kInt4) {
    return tile_function_of<FromReceived<Code::kInt4> >(code);
  }
  return tile_function_of<FromReceived<Code::kInt8> >(code);
}

bool quantize_tiles(const Quantize& args) {
  const TileFunction run = tile_function(args);
  bool marked = false;
  for (std::size_t t = 0; t < args.tiles.size(); ++t) {
    const GroupTile& tile = args.tiles[t];
    TileFigures* const figures = args.figures == nullptr ? nullptr : args.figures + t;
    if (figures != nullptr) *figures = {};
    const WholeGroups groups(tile, args.group_size);
    for (std::int32_t g = 0; g < groups.all; ++g) {
      if (g == groups.first && groups.count() > 0) {
        marked |= run(args, tile, groups, figures);
        g = groups.end - 1;
      } else {
        marked |= quantize_group(args, tile, group_of(tile, args.group_size, g), figures);
      }
    }
    write_fillers(args.out, tile, groups.all);
  }
  return marked;
}

#endif  // a target with vectors

}  // namespace HWY_NAMESPACE
}  // namespace hsdp::quant
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace hsdp::quant {

HWY_EXPORT(quantize_tiles);

bool quantize_simd(const Quantize& args) {
  const kernels::DefaultFloatEnvironment environment;
  if (kernels::simd_choice().scalar) return quantize_scalar(args);
  return HSDP_SIMD_DISPATCH(quantize_tiles)(args);
}

}  // namespace hsdp::quant

#endif  // HWY_ONCE
