// The bodies of the CUDA kernels of quantize.h. A block works on one tile at a time and keeps its
// values in shared memory between the phases, so that it reads global memory once. Internal to
// quant/.
//
// A unit is eight consecutive elements of a group, or fewer at the end of a short group: one word
// of int4 codes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_group.h"
#include "quant/dither.h"
#include "quant/group_arithmetic.h"
#include "quant/quantize.h"
#include "quant/quantize_tile.h"

namespace hsdp::quant {

using kernels::Block;

constexpr int kUnitElements = kernels::kGroupElements;
constexpr int kMostTileGroups = kTileElements / kLeastGroupSize;
constexpr int kMostTileUnits = kTileElements / kUnitElements;
constexpr int kUnitsAThread = kMostTileUnits / Block::kThreads;
static_assert(kMostTileUnits % Block::kThreads == 0);

// The units per group. A GPU divides faster if their number is a power of two.
struct UnitCut {
  explicit UnitCut(int group_size_ = 64)
      : group_size(group_size_), units(group_size_ / kUnitElements) {
    const auto number = static_cast<unsigned>(units);
    if (std::has_single_bit(number)) shift = std::countr_zero(number);
  }
  [[nodiscard]] HSDP_HOST_DEVICE int group_of(int unit) const {
    return shift >= 0 ? unit >> shift : unit / units;
  }

  int group_size;
  int units;
  int shift = -1;
};

// What all units of a tile have in common.
struct TileCut {
  HSDP_HOST_DEVICE TileCut(const GroupTile& tile, const UnitCut& cut)
      : head(head_of(tile, cut.group_size)),
        count(tile.count),
        groups(cut.group_of((head + count - 1) / kUnitElements) + 1),
        first_count(group_after(head, count, cut.group_size, 0).count) {}

  std::int32_t head;
  std::int32_t count;
  std::int32_t groups;
  std::int32_t first_count;
};

struct Unit {
  TileGroup group;
  std::int32_t first = 0;  // first element, in the tile
  std::int32_t place = 0;  // of the first element, in the group
  std::int32_t count = 0;  // 0: the group is short
};

HSDP_HOST_DEVICE inline Unit unit_of(const TileCut& tile, const UnitCut& cut, int number) {
  const int group = cut.group_of(number);
  Unit unit;
  unit.group = group_after(tile.head, tile.count, cut.group_size, group);
  unit.place = (number - group * cut.units) * kUnitElements;
  unit.first = unit.group.begin + unit.place;
  const std::int32_t left = unit.group.count - unit.place;
  unit.count = left < 0 ? 0 : left < kUnitElements ? left : kUnitElements;
  return unit;
}

// Values past a unit's count are 0. Moved 16 bytes at a time.
struct alignas(16) UnitValues {
  float values[kUnitElements];
};

HSDP_HOST_DEVICE inline UnitValues load_floats(const float* from, std::int32_t count) {
  UnitValues result{};
  if (count == kUnitElements) {
    const auto raw = kernels::load_raw<4 * kUnitElements>(from);
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) result.values[k] = std::bit_cast<float>(raw.words[k]);
    return result;
  }
  HSDP_UNROLL
  for (int k = 0; k < kUnitElements; ++k) {
    if (k < count) result.values[k] = from[k];
  }
  return result;
}

HSDP_HOST_DEVICE inline void store_floats(const UnitValues& unit, float* to, std::int32_t count) {
  if (count == kUnitElements) {
    kernels::RawBytes<4 * kUnitElements> raw;
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      raw.words[k] = std::bit_cast<std::uint32_t>(unit.values[k]);
    }
    kernels::store_raw(raw, to);
    return;
  }
  HSDP_UNROLL
  for (int k = 0; k < kUnitElements; ++k) {
    if (k < count) to[k] = unit.values[k];
  }
}

// `codes` may lie at any address.
HSDP_HOST_DEVICE inline UnitValues decode_bytes(const std::int8_t* codes, float scale,
                                                std::int32_t count) {
  std::uint32_t words[2] = {};
  if (count == kUnitElements && reinterpret_cast<std::uintptr_t>(codes) % 4 == 0) {
    kernels::move_bytes<kernels::AccessOf4, kUnitElements>(codes, words);
  } else {
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      if (k >= count) continue;
      words[k / 4] |= std::uint32_t{static_cast<std::uint8_t>(codes[k])} << (k % 4 * 8);
    }
  }
  UnitValues result;
  HSDP_UNROLL
  for (int k = 0; k < kUnitElements; ++k) {
    const auto code = static_cast<std::int8_t>(words[k / 4] >> (k % 4 * 8));
    result.values[k] = k < count ? decoded(code, scale) : 0.0F;
  }
  return result;
}

// Code `k` of a word of int4 codes. Avoids converting an integer, which is slower on a GPU.
HSDP_HOST_DEVICE inline float code_in_word(std::uint32_t word, int k) {
  constexpr std::uint32_t kUnitIsOneBits = 0x4b000000U;  // 2^23
  return std::bit_cast<float>((word >> (4 * k) & 15U) | kUnitIsOneBits) - (0x1p23F + 8.0F);
}

HSDP_HOST_DEVICE inline float load_scale(const std::byte* from, Dtype dtype) {
  return kernels::decode(from, 0, dtype);
}

HSDP_HOST_DEVICE inline void store_scale(float scale, std::byte* to, Dtype dtype) {
  const auto bits = std::bit_cast<std::uint32_t>(scale);
  if (dtype == Dtype::kF32) {
    reinterpret_cast<kernels::AccessOf4*>(to)->words[0] = bits;
  } else {
    reinterpret_cast<kernels::AccessOf2*>(to)->half = static_cast<std::uint16_t>(bits >> 16);
  }
}

HSDP_HOST_DEVICE inline UnitValues decode_unit(const std::byte* codes, float scale, Code code,
                                               const Unit& unit) {
  UnitValues result{};
  if (code == Code::kBf16) {
    const std::byte* const from = codes + 2 * static_cast<std::ptrdiff_t>(unit.place);
    if (unit.count == kUnitElements) {
      const kernels::Group group = kernels::load_group(from, Dtype::kBf16);
      HSDP_UNROLL
      for (int k = 0; k < kUnitElements; ++k) result.values[k] = group.values[k];
      return result;
    }
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      if (k < unit.count) result.values[k] = kernels::decode(from, k, Dtype::kBf16);
    }
    return result;
  }
  if (code == Code::kInt8) {
    return decode_bytes(reinterpret_cast<const std::int8_t*>(codes) + unit.place, scale,
                        unit.count);
  }
  const std::uint32_t word =
      reinterpret_cast<const kernels::AccessOf4*>(codes + unit.place / 2)->words[0];
  HSDP_UNROLL
  for (int k = 0; k < kUnitElements; ++k) {
    const float value = code_in_word(word, k) * scale;
    result.values[k] = k < unit.count ? value : 0.0F;
  }
  return result;
}

// The sum of messages of integers, in order. `first`: the place of the tile in the first one.
HSDP_HOST_DEVICE inline UnitValues sum_of(const ReceivedMessages& messages, const TilePlace& first,
                                          const Unit& unit) {
  const GroupFormat& format = messages.first.format;
  const std::byte* codes = first.codes_of(unit.group.number);
  const std::byte* scale = first.scale_of(unit.group.number);
  UnitValues sum{};
  if (unit.count == 0) return sum;
  HSDP_UNROLL_BY(4)
  for (int r = 0; r < messages.count; ++r) {
    const UnitValues row =
        decode_unit(codes, load_scale(scale, format.scale_dtype), format.code, unit);
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      sum.values[k] = r == 0 ? row.values[k] : sum.values[k] + row.values[k];
    }
    codes += messages.distance;
    scale += messages.distance;
  }
  return sum;
}

struct UnitCodes {
  std::int32_t codes[kUnitElements];
};

HSDP_HOST_DEVICE inline void store_codes(const UnitCodes& unit, std::int32_t count, Code code,
                                         std::byte* to) {
  auto* const words = reinterpret_cast<kernels::AccessOf4*>(to);
  if (code == Code::kInt4) {
    std::uint32_t packed = 0;
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      packed |= static_cast<std::uint32_t>(unit.codes[k] + 8) << (4 * k);
    }
    words[0].words[0] = count < kUnitElements ? packed & ((1U << (4 * count)) - 1U) : packed;
    return;
  }
  HSDP_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (count <= 4 * half) continue;
    std::uint32_t packed = 0;
    HSDP_UNROLL
    for (int k = 0; k < 4; ++k) {
      if (4 * half + k >= count) continue;
      packed |= static_cast<std::uint32_t>(unit.codes[4 * half + k] & 0xff) << (8 * k);
    }
    words[half].words[0] = packed;
  }
}

// `to` may be any address.
HSDP_HOST_DEVICE inline void store_bytes(const UnitCodes& unit, std::int32_t count,
                                         std::int8_t* to) {
  if (count == kUnitElements && reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
    store_codes(unit, count, Code::kInt8, reinterpret_cast<std::byte*>(to));
    return;
  }
  HSDP_UNROLL
  for (int k = 0; k < kUnitElements; ++k) {
    if (k < count) to[k] = static_cast<std::int8_t>(unit.codes[k]);
  }
}

struct QuantizeBody {
  static constexpr int kResident = 4;  // minimum blocks per multiprocessor
  struct Shared {
    // Halves of all units: a warp's accesses of 16 bytes then have no bank conflicts.
    alignas(16) float values[2][kMostTileUnits][kUnitElements / 2];
    std::uint32_t tops[kMostTileGroups];  // magnitude bits
    GroupScaling scalings[kMostTileGroups];
    TileFigures figures;
  };

  const GroupTile* tiles = nullptr;
  std::int64_t tile_count = 0;
  UnitCut cut;
  const float* values = nullptr;
  float factor = 1.0F;
  ReceivedMessages received;
  ErrorState before;
  ErrorState after;
  float beta = 0.0F;
  bool has_dither = false;
  Dither dither;
  Message out;
  TileFigures* figures = nullptr;
  std::uint32_t* nonfinite = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& shared) const {
    for (std::int64_t t = block.index(); t < tile_count; t += block.count()) {
      const GroupTile tile = tiles[t];
      const TileCut tile_cut(tile, cut);
      block.each_thread([&](int thread) {
        if (thread < tile_cut.groups) shared.tops[thread] = 0;
        if (thread == 0) shared.figures = {};
      });
      read(block, tile, tile_cut, shared);
      const TilePlace to = place_of(out, tile, tile_cut.first_count);
      if (out.format.code == Code::kBf16) {
        round(block, to, tile_cut, shared);
      } else {
        code(block, tile, to, tile_cut, shared);
      }
      block.each_thread([&](int thread) {
        if (thread != 0) return;
        write_fillers(out, tile, tile_cut.groups);
        if (figures != nullptr) figures[t] = shared.figures;
      });
    }
  }

 private:
  template <class Visit>
  HSDP_HOST_DEVICE void each_unit(const Block& block, const TileCut& tile,
                                  const Visit& visit) const {
    const int units = tile.groups * cut.units;
    block.each_thread([&](int thread) {
      for (int number = thread; number < units; number += Block::kThreads) {
        const Unit unit = unit_of(tile, cut, number);
        if (unit.count > 0) visit(unit, number);
      }
    });
  }

  // Reads h of every unit and finds the largest magnitude of each group. Each thread loads all its
  // units together, to hide the latency of memory.
  HSDP_HOST_DEVICE void read(const Block& block, const GroupTile& tile, const TileCut& tile_cut,
                             Shared& shared) const {
    const int units = tile_cut.groups * cut.units;
    const bool sums = values == nullptr;
    const TilePlace from =
        sums ? place_of(received.first, tile, tile_cut.first_count) : TilePlace{};
    block.each_thread([&](int thread) {
      Unit unit[kUnitsAThread];
      UnitValues h[kUnitsAThread];
      HSDP_UNROLL
      for (int i = 0; i < kUnitsAThread; ++i) {
        const int number = thread + i * Block::kThreads;
        unit[i] = number < units ? unit_of(tile_cut, cut, number) : Unit{};
        h[i] = sums ? sum_of(received, from, unit[i])
                    : load_floats(values + tile.element + unit[i].first, unit[i].count);
      }
      HSDP_UNROLL
      for (int i = 0; i < kUnitsAThread; ++i) {
        if (unit[i].count == 0) continue;
        if (!sums) {
          HSDP_UNROLL
          for (float& value : h[i].values) value = value * factor;
        }
        if (before.exists()) {
          const UnitValues e = error_of(tile, unit[i]);
          HSDP_UNROLL
          for (int k = 0; k < kUnitElements; ++k) h[i].values[k] = h[i].values[k] + e.values[k];
        }
        keep(block, unit[i], thread + i * Block::kThreads, h[i], shared);
      }
    });
  }

  // Where the error of a tile's element lies, and the scale of its group.
  [[nodiscard]] HSDP_HOST_DEVICE static std::int64_t error_place(const ErrorState& state,
                                                                 const GroupTile& tile,
                                                                 std::int32_t element) {
    return static_cast<std::int64_t>(tile.position) - state.position + element;
  }
  [[nodiscard]] HSDP_HOST_DEVICE static std::int64_t scale_place(const ErrorState& state,
                                                                 const GroupTile& tile,
                                                                 std::int32_t group) {
    return static_cast<std::int64_t>(tile.group) - state.group + group;
  }

  [[nodiscard]] HSDP_HOST_DEVICE UnitValues error_of(const GroupTile& tile,
                                                     const Unit& unit) const {
    const std::int64_t place = error_place(before, tile, unit.first);
    if (before.values != nullptr) return load_floats(before.values + place, unit.count);
    return decode_bytes(before.codes + place,
                        before.scales[scale_place(before, tile, unit.group.number)], unit.count);
  }

  HSDP_HOST_DEVICE static void keep(const Block& block, const Unit& unit, int number,
                                    const UnitValues& kept, Shared& shared) {
    std::uint32_t top = 0;
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      const std::uint32_t magnitude = magnitude_bits(kept.values[k]);
      top = magnitude > top ? magnitude : top;
    }
    HSDP_UNROLL
    for (int half = 0; half < 2; ++half) {
      kernels::move_bytes<kernels::AccessOf16, 16>(kept.values + 4 * half,
                                                   shared.values[half][number]);
    }
    block.raise_to(top, &shared.tops[unit.group.number]);
  }

  [[nodiscard]] HSDP_HOST_DEVICE static UnitValues kept_values(const Shared& shared, int number) {
    UnitValues kept;
    HSDP_UNROLL
    for (int half = 0; half < 2; ++half) {
      kernels::move_bytes<kernels::AccessOf16, 16>(shared.values[half][number],
                                                   kept.values + 4 * half);
    }
    return kept;
  }

  HSDP_HOST_DEVICE void note(const Block& block, double missed, double wanted,
                             Shared& shared) const {
    block.add(missed, &shared.figures.missed);
    block.add(wanted, &shared.figures.wanted);
  }

  HSDP_HOST_DEVICE void round(const Block& block, const TilePlace& to, const TileCut& tile,
                              Shared& shared) const {
    const int units = tile.groups * cut.units;
    block.each_thread([&](int thread) {
      bool marked = false;
      for (int number = thread; number < units; number += Block::kThreads) {
        const Unit unit = unit_of(tile, cut, number);
        if (unit.count == 0) continue;
        const UnitValues h = kept_values(shared, number);
        kernels::Group sent;
        double missed = 0.0;
        double wanted = 0.0;
        HSDP_UNROLL
        for (int k = 0; k < kUnitElements; ++k) {
          sent.values[k] = kernels::rounded_through(h.values[k], Dtype::kBf16);
          if (magnitude_bits(sent.values[k]) >= kInfinityBits) {
            marked = true;
            continue;
          }
          if (figures == nullptr) continue;
          const double gap = static_cast<double>(h.values[k]) - sent.values[k];
          missed += gap * gap;
          wanted += static_cast<double>(h.values[k]) * h.values[k];
        }
        if (figures != nullptr) note(block, missed, wanted, shared);
        store_bf16(sent, unit.count,
                   to.codes_of(unit.group.number) + 2 * static_cast<std::ptrdiff_t>(unit.place));
      }
      block.raise(marked, nonfinite);
    });
  }

  HSDP_HOST_DEVICE static void store_bf16(const kernels::Group& sent, std::int32_t count,
                                          std::byte* to) {
    if (count == kUnitElements) return kernels::store_group(sent, to, Dtype::kBf16);
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      if (k < count) kernels::encode(sent.values[k], to, k, Dtype::kBf16);
    }
  }

  // Computes the scalings of all groups from their tops.
  HSDP_HOST_DEVICE void scale(const Block& block, const TilePlace& to, int groups,
                              Shared& shared) const {
    const ScalingRule rule = scaling_rule(out.format.code, out.format.scale_dtype);
    block.each_thread([&](int thread) {
      bool marked = false;
      if (thread < groups) {
        const std::uint32_t top = shared.tops[thread];
        shared.scalings[thread] = scaling_of(top, rule);
        shared.tops[thread] = 0;
        marked = top >= kInfinityBits;
        store_scale(shared.scalings[thread].scale, to.scale_of(thread), out.format.scale_dtype);
      }
      block.raise(marked, nonfinite);
    });
  }

  HSDP_HOST_DEVICE void code(const Block& block, const GroupTile& tile, const TilePlace& to,
                             const TileCut& tile_cut, Shared& shared) const {
    scale(block, to, tile_cut.groups, shared);
    each_unit(block, tile_cut, [&](const Unit& unit, int number) {
      code_unit(block, tile, to, unit, number, shared);
    });
    if (!before.exists() || after.values != nullptr) return;
    constexpr ScalingRule kRule = scaling_rule(Code::kInt8, Dtype::kF32);
    block.each_thread([&](int thread) {
      if (thread >= tile_cut.groups) return;
      shared.scalings[thread] = scaling_of(shared.tops[thread], kRule);
      after.scales[scale_place(after, tile, thread)] = shared.scalings[thread].scale;
    });
    each_unit(block, tile_cut,
              [&](const Unit& unit, int number) { code_error(tile, unit, number, shared); });
  }

  HSDP_HOST_DEVICE void code_unit(const Block& block, const GroupTile& tile, const TilePlace& to,
                                  const Unit& unit, int number, Shared& shared) const {
    const GroupScaling scaling = shared.scalings[unit.group.number];
    const bool marked = magnitude_bits(scaling.scale) >= kInfinityBits;
    const UnitValues h = kept_values(shared, number);
    UnitCodes codes{};
    if (!marked) {
      HSDP_UNROLL
      for (int k = 0; k < kUnitElements; ++k) codes.codes[k] = code_of(h.values[k], scaling);
    }
    store_codes(codes, unit.count, out.format.code,
                to.codes_of(unit.group.number) +
                    (out.format.code == Code::kInt4 ? unit.place / 2 : unit.place));
    if (figures != nullptr && !marked) {
      double missed = 0.0;
      double wanted = 0.0;
      HSDP_UNROLL
      for (int k = 0; k < kUnitElements; ++k) {
        const float gap = h.values[k] - decoded(codes.codes[k], scaling.scale);
        missed += static_cast<double>(gap) * gap;
        wanted += static_cast<double>(h.values[k]) * h.values[k];
      }
      note(block, missed, wanted, shared);
    }
    if (!before.exists()) return;
    const UnitValues e = error_of(tile, unit);
    const float take = 1.0F - beta;
    UnitValues next;
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      next.values[k] =
          next_error(e.values[k], h.values[k], decoded(codes.codes[k], scaling.scale), beta, take);
    }
    if (after.values != nullptr) {
      store_floats(next, after.values + error_place(after, tile, unit.first), unit.count);
    } else {
      keep(block, unit, number, next, shared);
    }
  }

  HSDP_HOST_DEVICE void code_error(const GroupTile& tile, const Unit& unit, int number,
                                   const Shared& shared) const {
    const GroupScaling scaling = shared.scalings[unit.group.number];
    const bool marked = magnitude_bits(scaling.scale) >= kInfinityBits;
    const UnitValues error = kept_values(shared, number);
    UnitCodes codes{};
    if (!marked && !has_dither) {
      HSDP_UNROLL
      for (int k = 0; k < kUnitElements; ++k) codes.codes[k] = code_of(error.values[k], scaling);
    } else if (!marked) {
      PhiloxWords words{};
      std::int64_t drawn = -1;  // index of the 16 elements these belong to
      HSDP_UNROLL
      for (int k = 0; k < kUnitElements; ++k) {
        const std::int64_t flat = tile.flat_offset + unit.first + k;
        if (drawn != flat / kDitherElements) {
          drawn = flat / kDitherElements;
          words = dither_words(dither, tile.parameter, flat);
        }
        const float shift = dither_of(words, static_cast<int>(flat % kDitherElements));
        codes.codes[k] = code_of(error.values[k], scaling, shift);
      }
    }
    store_bytes(codes, unit.count, after.codes + error_place(after, tile, unit.first));
  }
};

// kSums: for several messages, which take more registers.
template <bool kSums>
struct DequantizeBody {
  static constexpr int kResident = 4;
  struct Shared {};

  const GroupTile* tiles = nullptr;
  std::int64_t tile_count = 0;
  UnitCut cut;
  ReceivedMessages in;
  float* values = nullptr;
  std::int64_t begin = 0;
  std::uint32_t* nonfinite = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    for (std::int64_t t = block.index(); t < tile_count; t += block.count()) {
      const GroupTile tile = tiles[t];
      const TileCut tile_cut(tile, cut);
      const TilePlace from = place_of(in.first, tile, tile_cut.first_count);
      const int units = tile_cut.groups * cut.units;
      block.each_thread([&](int thread) {
        bool marked = false;
        for (int number = thread; number < units; number += Block::kThreads) {
          const Unit unit = unit_of(tile_cut, cut, number);
          if (unit.count == 0) continue;
          const UnitValues decoded = decode(from, unit);
          HSDP_UNROLL
          for (const float value : decoded.values) marked |= magnitude_bits(value) >= kInfinityBits;
          store_floats(decoded, values + (tile.element - begin) + unit.first, unit.count);
        }
        block.raise(marked, nonfinite);
      });
    }
  }

 private:
  [[nodiscard]] HSDP_HOST_DEVICE UnitValues decode(const TilePlace& from, const Unit& unit) const {
    if constexpr (kSums) {
      return sum_of(in, from, unit);
    } else {
      const GroupFormat& format = in.first.format;
      const int group = unit.group.number;
      const float scale =
          format.code == Code::kBf16 ? 0.0F : load_scale(from.scale_of(group), format.scale_dtype);
      return decode_unit(from.codes_of(group), scale, format.code, unit);
    }
  }
};

}  // namespace hsdp::quant
