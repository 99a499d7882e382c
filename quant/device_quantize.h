// The bodies of the CUDA kernels of quantize.h: a block works on one tile at a time, and keeps its
// numbers in shared memory between the phases, so that global memory is passed over once. Internal
// to quant/.
//
// A unit is eight elements of a group in their order, the last one of a short group fewer: a word
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

struct Unit {
  TileGroup group;
  std::int32_t first = 0;  // its first element, in the tile
  std::int32_t place = 0;  // of that, in the group
  std::int32_t count = 0;  // none: the group is short
};

HSDP_HOST_DEVICE inline Unit unit_of(const GroupTile& tile, int group_size, int number) {
  const int units = group_size / kUnitElements;
  Unit unit;
  unit.group = group_of(tile, group_size, number / units);
  unit.place = number % units * kUnitElements;
  unit.first = unit.group.begin + unit.place;
  const std::int32_t left = unit.group.count - unit.place;
  unit.count = left < 0 ? 0 : left < kUnitElements ? left : kUnitElements;
  return unit;
}

struct UnitValues {
  float values[kUnitElements];
};

HSDP_HOST_DEVICE inline UnitValues load_floats(const float* from, std::int32_t count) {
  UnitValues result{};
  if (count == kUnitElements) {
    const auto raw = kernels::load_raw<4 * kUnitElements>(from);
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) result.values[k] = std::bit_cast<float>(raw.words[k]);
  } else {
    for (int k = 0; k < count; ++k) result.values[k] = from[k];
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
  } else {
    for (int k = 0; k < count; ++k) to[k] = unit.values[k];
  }
}

// Bytes at any address.
HSDP_HOST_DEVICE inline UnitValues decode_bytes(const std::int8_t* codes, float scale,
                                                std::int32_t count) {
  UnitValues result{};
  std::uint32_t words[2] = {};
  if (count == kUnitElements && reinterpret_cast<std::uintptr_t>(codes) % 4 == 0) {
    kernels::move_bytes<kernels::AccessOf4, kUnitElements>(codes, words);
  } else {
    for (int k = 0; k < count; ++k) {
      words[k / 4] |= std::uint32_t{static_cast<std::uint8_t>(codes[k])} << (k % 4 * 8);
    }
  }
  HSDP_UNROLL
  for (int k = 0; k < kUnitElements; ++k) {
    const auto code = static_cast<std::int8_t>(words[k / 4] >> (k % 4 * 8));
    result.values[k] = k < count ? decoded(code, scale) : 0.0F;
  }
  return result;
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

// A unit of a message, decoded.
HSDP_HOST_DEVICE inline UnitValues decode_unit(const Message& message, const GroupTile& tile,
                                               const Unit& unit, std::int32_t first_count) {
  const std::byte* const codes = codes_of(message, tile, unit.group, first_count);
  const Code code = message.format.code;
  UnitValues result{};
  if (code == Code::kBf16) {
    const std::byte* const from = codes + 2 * static_cast<std::ptrdiff_t>(unit.place);
    for (int k = 0; k < unit.count; ++k) result.values[k] = kernels::decode(from, k, Dtype::kBf16);
    return result;
  }
  const float scale = load_scale(scale_of(message, tile, unit.group), message.format.scale_dtype);
  if (code == Code::kInt8) {
    return decode_bytes(reinterpret_cast<const std::int8_t*>(codes) + unit.place, scale,
                        unit.count);
  }
  const std::uint32_t word =
      reinterpret_cast<const kernels::AccessOf4*>(codes + unit.place / 2)->words[0];
  HSDP_UNROLL
  for (int k = 0; k < kUnitElements; ++k) {
    const auto half = static_cast<std::int32_t>(word >> (4 * k) & 15U);
    if (k < unit.count) result.values[k] = decoded(half - 8, scale);
  }
  return result;
}

struct UnitCodes {
  std::int32_t codes[kUnitElements];
};

HSDP_HOST_DEVICE inline void store_codes(const UnitCodes& unit, std::int32_t count, Code code,
                                         std::byte* to) {
  auto* const words = reinterpret_cast<kernels::AccessOf4*>(to);
  std::uint32_t packed[2] = {};
  HSDP_UNROLL
  for (int k = 0; k < kUnitElements; ++k) {
    if (k >= count) continue;
    if (code == Code::kInt4) {
      packed[0] |= static_cast<std::uint32_t>(unit.codes[k] + 8) << (4 * k);
    } else {
      packed[k / 4] |= static_cast<std::uint32_t>(unit.codes[k] & 0xff) << (k % 4 * 8);
    }
  }
  words[0].words[0] = packed[0];
  if (code == Code::kInt8 && count > 4) words[1].words[0] = packed[1];
}

// To any address.
HSDP_HOST_DEVICE inline void store_bytes(const UnitCodes& unit, std::int32_t count,
                                         std::int8_t* to) {
  if (count == kUnitElements && reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
    store_codes(unit, count, Code::kInt8, reinterpret_cast<std::byte*>(to));
  } else {
    for (int k = 0; k < count; ++k) to[k] = static_cast<std::int8_t>(unit.codes[k]);
  }
}

struct QuantizeBody {
  static constexpr int kResident = 4;  // blocks of a multiprocessor, at least
  struct Shared {
    float values[kTileElements];          // of unit u from 8 u on
    std::uint32_t tops[kMostTileGroups];  // magnitude bits
    GroupScaling scalings[kMostTileGroups];
    TileFigures figures;
  };

  const GroupTile* tiles = nullptr;
  std::int64_t tile_count = 0;
  int group_size = 64;
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
      const int groups = group_count(tile, group_size);
      block.each_thread([&](int thread) {
        if (thread < groups) shared.tops[thread] = 0;
        if (thread == 0) shared.figures = {};
      });
      each_unit(block, tile, groups,
                [&](const Unit& unit, int number) { read(block, tile, unit, number, shared); });
      if (out.format.code == Code::kBf16) {
        round(block, tile, groups, shared);
      } else {
        code(block, tile, groups, shared);
      }
      block.each_thread([&](int thread) {
        if (thread != 0) return;
        write_fillers(out, tile, groups);
        if (figures != nullptr) figures[t] = shared.figures;
      });
    }
  }

 private:
  template <class Visit>
  HSDP_HOST_DEVICE void each_unit(const Block& block, const GroupTile& tile, int groups,
                                  const Visit& visit) const {
    const int units = groups * (group_size / kUnitElements);
    block.each_thread([&](int thread) {
      for (int number = thread; number < units; number += Block::kThreads) {
        const Unit unit = unit_of(tile, group_size, number);
        if (unit.count > 0) visit(unit, number);
      }
    });
  }

  [[nodiscard]] HSDP_HOST_DEVICE std::int32_t first_count(const GroupTile& tile) const {
    return group_of(tile, group_size, 0).count;
  }

  // Where an element of the tile has its error, and a group its scale.
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

  [[nodiscard]] HSDP_HOST_DEVICE UnitValues given(const GroupTile& tile, const Unit& unit) const {
    if (values != nullptr) {
      UnitValues result = load_floats(values + tile.element + unit.first, unit.count);
      HSDP_UNROLL
      for (float& value : result.values) value = value * factor;
      return result;
    }
    UnitValues sum{};
    for (int r = 0; r < received.count; ++r) {
      const UnitValues row = decode_unit(received.at(r), tile, unit, first_count(tile));
      HSDP_UNROLL
      for (int k = 0; k < kUnitElements; ++k) {
        sum.values[k] = r == 0 ? row.values[k] : sum.values[k] + row.values[k];
      }
    }
    return sum;
  }

  // h, and the largest magnitude of each group.
  HSDP_HOST_DEVICE void read(const Block& block, const GroupTile& tile, const Unit& unit,
                             int number, Shared& shared) const {
    UnitValues h = given(tile, unit);
    if (before.exists()) {
      const UnitValues e = error_of(tile, unit);
      HSDP_UNROLL
      for (int k = 0; k < kUnitElements; ++k) h.values[k] = h.values[k] + e.values[k];
    }
    keep(block, unit, number, h, shared);
  }

  HSDP_HOST_DEVICE static void keep(const Block& block, const Unit& unit, int number,
                                    const UnitValues& unit_values, Shared& shared) {
    std::uint32_t top = 0;
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      if (k >= unit.count) continue;
      const std::uint32_t magnitude = magnitude_bits(unit_values.values[k]);
      top = magnitude > top ? magnitude : top;
      shared.values[number * kUnitElements + k] = unit_values.values[k];
    }
    block.raise_to(top, &shared.tops[unit.group.number]);
  }

  HSDP_HOST_DEVICE void note(const Block& block, double missed, double wanted,
                             Shared& shared) const {
    block.add(missed, &shared.figures.missed);
    block.add(wanted, &shared.figures.wanted);
  }

  HSDP_HOST_DEVICE void round(const Block& block, const GroupTile& tile, int groups,
                              Shared& shared) const {
    const int units = groups * (group_size / kUnitElements);
    block.each_thread([&](int thread) {
      bool marked = false;
      for (int number = thread; number < units; number += Block::kThreads) {
        const Unit unit = unit_of(tile, group_size, number);
        std::byte* const to =
            codes_of(out, tile, unit.group, 0) + 2 * static_cast<std::ptrdiff_t>(unit.place);
        double missed = 0.0;
        double wanted = 0.0;
        for (int k = 0; k < unit.count; ++k) {
          const float h = shared.values[number * kUnitElements + k];
          const Bf16 bits = to_bf16(h);
          reinterpret_cast<kernels::AccessOf2*>(to)[k].half = bits.bits;
          const float sent = to_float(bits);
          if (magnitude_bits(sent) >= kInfinityBits) {
            marked = true;
            continue;
          }
          const double gap = static_cast<double>(h) - sent;
          missed += gap * gap;
          wanted += static_cast<double>(h) * h;
        }
        if (figures != nullptr) note(block, missed, wanted, shared);
      }
      block.raise(marked, nonfinite);
    });
  }

  // The scalings of all groups, from their tops.
  HSDP_HOST_DEVICE void scale(const Block& block, const GroupTile& tile, int groups,
                              Shared& shared) const {
    const ScalingRule rule = scaling_rule(out.format.code, out.format.scale_dtype);
    block.each_thread([&](int thread) {
      bool marked = false;
      if (thread < groups) {
        const std::uint32_t top = shared.tops[thread];
        shared.scalings[thread] = scaling_of(top, rule);
        shared.tops[thread] = 0;
        marked = top >= kInfinityBits;
        store_scale(shared.scalings[thread].scale, scale_of(out, tile, {0, 0, thread}),
                    out.format.scale_dtype);
      }
      block.raise(marked, nonfinite);
    });
  }

  HSDP_HOST_DEVICE void code(const Block& block, const GroupTile& tile, int groups,
                             Shared& shared) const {
    scale(block, tile, groups, shared);
    each_unit(block, tile, groups,
              [&](const Unit& unit, int number) { code_unit(block, tile, unit, number, shared); });
    if (!before.exists() || after.values != nullptr) return;
    constexpr ScalingRule kRule = scaling_rule(Code::kInt8, Dtype::kF32);
    block.each_thread([&](int thread) {
      if (thread >= groups) return;
      shared.scalings[thread] = scaling_of(shared.tops[thread], kRule);
      after.scales[scale_place(after, tile, thread)] = shared.scalings[thread].scale;
    });
    each_unit(block, tile, groups,
              [&](const Unit& unit, int number) { code_error(tile, unit, number, shared); });
  }

  HSDP_HOST_DEVICE void code_unit(const Block& block, const GroupTile& tile, const Unit& unit,
                                  int number, Shared& shared) const {
    const GroupScaling scaling = shared.scalings[unit.group.number];
    const bool marked = magnitude_bits(scaling.scale) >= kInfinityBits;
    UnitCodes codes{};
    UnitValues gaps{};
    double missed = 0.0;
    double wanted = 0.0;
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      if (k >= unit.count) continue;
      const float h = shared.values[number * kUnitElements + k];
      if (!marked) codes.codes[k] = code_of(h, scaling);
      gaps.values[k] = h - decoded(codes.codes[k], scaling.scale);
      if (figures == nullptr || marked) continue;
      missed += static_cast<double>(gaps.values[k]) * gaps.values[k];
      wanted += static_cast<double>(h) * h;
    }
    if (figures != nullptr) note(block, missed, wanted, shared);
    std::byte* const to = codes_of(out, tile, unit.group, first_count(tile));
    store_codes(codes, unit.count, out.format.code,
                to + (out.format.code == Code::kInt4 ? unit.place / 2 : unit.place));
    if (!before.exists()) return;
    const UnitValues e = error_of(tile, unit);
    const float take = 1.0F - beta;
    UnitValues next{};
    HSDP_UNROLL
    for (int k = 0; k < kUnitElements; ++k) {
      next.values[k] = beta * e.values[k] + take * gaps.values[k];
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
    UnitCodes codes{};
    PhiloxWords words{};
    std::int64_t drawn = -1;  // which 16 elements these are for
    for (int k = 0; k < unit.count; ++k) {
      const float error = shared.values[number * kUnitElements + k];
      if (!has_dither) {
        if (!marked) codes.codes[k] = code_of(error, scaling);
        continue;
      }
      const std::int64_t flat = tile.flat_offset + unit.first + k;
      if (drawn != flat / kDitherElements) {
        drawn = flat / kDitherElements;
        words = dither_words(dither, tile.parameter, flat);
      }
      const float shift = dither_of(words, static_cast<int>(flat % kDitherElements));
      if (!marked) codes.codes[k] = code_of(error, scaling, shift);
    }
    store_bytes(codes, unit.count, after.codes + error_place(after, tile, unit.first));
  }
};

struct DequantizeBody {
  static constexpr int kResident = 4;
  struct Shared {};

  const GroupTile* tiles = nullptr;
  std::int64_t tile_count = 0;
  int group_size = 64;
  Message in;
  float* values = nullptr;
  std::uint32_t* nonfinite = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    for (std::int64_t t = block.index(); t < tile_count; t += block.count()) {
      const GroupTile tile = tiles[t];
      const int units = group_count(tile, group_size) * (group_size / kUnitElements);
      const std::int32_t first = group_of(tile, group_size, 0).count;
      block.each_thread([&](int thread) {
        bool marked = false;
        for (int number = thread; number < units; number += Block::kThreads) {
          const Unit unit = unit_of(tile, group_size, number);
          if (unit.count == 0) continue;
          const UnitValues decoded = decode_unit(in, tile, unit, first);
          if (in.format.code == Code::kBf16) {
            for (const float value : decoded.values) {
              marked |= magnitude_bits(value) >= kInfinityBits;
            }
          } else if (unit.place == 0) {
            const float scale = load_scale(scale_of(in, tile, unit.group), in.format.scale_dtype);
            marked |= magnitude_bits(scale) >= kInfinityBits;
          }
          store_floats(decoded, values + tile.element + unit.first, unit.count);
        }
        block.raise(marked, nonfinite);
      });
    }
  }
};

}  // namespace hsdp::quant
