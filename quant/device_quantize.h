// The bodies of the CUDA kernels of quantize.h: a block works on one tile at a time and keeps its
// numbers in registers, so that global memory is passed over once.
// Internal to quant/.
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

// A piece is kElements of a group in their order, what one thread works on at a time; the last one
// of a short group has fewer. How groups are cut into pieces: a GPU divides faster where their
// number is a power of two.
template <int kElements>
struct PieceCut {
  explicit PieceCut(int group_size_ = 64)
      : group_size(group_size_), pieces(group_size_ / kElements) {
    const auto number = static_cast<unsigned>(pieces);
    if (std::has_single_bit(number)) shift = std::countr_zero(number);
  }
  // The group of a tile's piece.
  [[nodiscard]] HSDP_HOST_DEVICE int group_of(int piece) const {
    return shift >= 0 ? piece >> shift : piece / pieces;
  }

  int group_size;
  int pieces;
  int shift = -1;
};

// What all pieces of a tile have in common.
struct TileCut {
  template <int kElements>
  HSDP_HOST_DEVICE TileCut(const GroupTile& tile, const PieceCut<kElements>& cut)
      : head(head_of(tile, cut.group_size)),
        count(tile.count),
        groups(cut.group_of((head + count - 1) / kElements) + 1),
        first_count(group_after(head, count, cut.group_size, 0).count) {}

  std::int32_t head;
  std::int32_t count;
  std::int32_t groups;
  std::int32_t first_count;
};

struct Piece {
  std::int32_t group = 0;
  std::int32_t first = 0;  // its first element, in the tile
  std::int32_t place = 0;  // of that, in the group
  std::int32_t count = 0;  // none: the group is short
};

template <int kElements>
HSDP_HOST_DEVICE inline Piece piece_of(const TileCut& tile, const PieceCut<kElements>& cut,
                                       int number) {
  Piece piece;
  piece.group = cut.group_of(number);
  const bool is_first = piece.group == 0;
  piece.first = number * kElements - (is_first ? 0 : tile.head);
  piece.place = number * kElements - piece.group * cut.group_size;
  const std::int32_t left = (is_first ? tile.first_count : tile.count) - piece.first;
  piece.count = left < 0 ? 0 : left < kElements ? left : kElements;
  return piece;
}

// Those behind `count` are 0.
template <int kElements>
HSDP_HOST_DEVICE inline void load_floats(const float* from, std::int32_t count,
                                         float (&to)[kElements]) {
  if (count == kElements) return kernels::move_group<4 * kElements, 4>(from, to, from);
  HSDP_UNROLL
  for (int k = 0; k < kElements; ++k) to[k] = k < count ? from[k] : 0.0F;
}

template <int kElements>
HSDP_HOST_DEVICE inline void store_floats(const float (&from)[kElements], std::int32_t count,
                                          float* to) {
  if (count == kElements) return kernels::move_group<4 * kElements, 4>(from, to, to);
  HSDP_UNROLL
  for (int k = 0; k < kElements; ++k) {
    if (k < count) to[k] = from[k];
  }
}

// Words of codes, which lie at multiples of 4 bytes. `count`: of elements.
template <int kWords, int kElements>
HSDP_HOST_DEVICE inline void load_words(const std::byte* from, std::int32_t count,
                                        std::uint32_t (&to)[kWords]) {
  if (count == kElements) return kernels::move_group<4 * kWords, 4>(from, to, from);
  HSDP_UNROLL
  for (int w = 0; w < kWords; ++w) {
    const bool exists = w * (kElements / kWords) < count;
    to[w] = exists ? reinterpret_cast<const kernels::AccessOf4*>(from)[w].words[0] : 0U;
  }
}

// Bytes at any address.
template <int kWords>
HSDP_HOST_DEVICE inline void load_bytes(const std::int8_t* from, std::int32_t count,
                                        std::uint32_t (&to)[kWords]) {
  if (count == 4 * kWords && reinterpret_cast<std::uintptr_t>(from) % 4 == 0) {
    return kernels::move_group<4 * kWords, 4>(from, to, from);
  }
  HSDP_UNROLL
  for (int w = 0; w < kWords; ++w) {
    to[w] = 0;
    HSDP_UNROLL
    for (int k = 4 * w; k < 4 * w + 4; ++k) {
      if (k < count) to[w] |= std::uint32_t{static_cast<std::uint8_t>(from[k])} << (k % 4 * 8);
    }
  }
}

template <int kWords>
HSDP_HOST_DEVICE inline void store_bytes(const std::uint32_t (&from)[kWords], std::int32_t count,
                                         std::int8_t* to) {
  if (count == 4 * kWords && reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
    return kernels::move_group<4 * kWords, 4>(from, to, to);
  }
  HSDP_UNROLL
  for (int k = 0; k < 4 * kWords; ++k) {
    if (k < count) to[k] = static_cast<std::int8_t>(from[k / 4] >> (k % 4 * 8));
  }
}

HSDP_HOST_DEVICE inline float load_scale(const std::byte* from, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    return std::bit_cast<float>(reinterpret_cast<const kernels::AccessOf4*>(from)->words[0]);
  }
  return to_float(Bf16{reinterpret_cast<const kernels::AccessOf2*>(from)->half});
}

HSDP_HOST_DEVICE inline void store_scale(float scale, std::byte* to, Dtype dtype) {
  const auto bits = std::bit_cast<std::uint32_t>(scale);
  if (dtype == Dtype::kF32) {
    reinterpret_cast<kernels::AccessOf4*>(to)->words[0] = bits;
  } else {
    reinterpret_cast<kernels::AccessOf2*>(to)->half = static_cast<std::uint16_t>(bits >> 16);
  }
}

// Integer code `k` of some words. An int4 code becomes a number by putting its bits into those of a
// power of two, as a GPU takes longer to convert an integer.
template <int kBits>
HSDP_HOST_DEVICE inline float code_in(const std::uint32_t* words, int k) {
  if constexpr (kBits == 8) {
    return static_cast<float>(static_cast<std::int8_t>(words[k / 4] >> (k % 4 * 8)));
  } else {
    const std::uint32_t half = k % 8 < 4 ? words[k / 8] : words[k / 8] >> 16;
    const int shift = k % 4 * 4;
    const std::uint32_t base = static_cast<std::uint32_t>(127 + 23 - shift)
                               << 23;  // 2^(23 - shift)
    return std::bit_cast<float>((half & 15U << shift) | base) - (std::bit_cast<float>(base) + 8.0F);
  }
}

// Where an integer of kBits is added to a float, rounded() finds it in the low bits, moved so far
// that it is not negative.
template <int kBits>
constexpr float kCodeOffset = kUnitIsOne + static_cast<float>(1 << (kBits - 1));

// The codes of numbers that are already scaled, as words.
template <int kBits, int kElements, int kWords = kElements* kBits / 32>
HSDP_HOST_DEVICE inline void pack_codes(const float (&scaled)[kElements],
                                        std::uint32_t (&words)[kWords]) {
  constexpr int kAWord = 32 / kBits;
  constexpr std::uint32_t kOnes = kBits == 4 ? 0x11111111U : 0x01010101U;
  // The sums of shifted floats' bits, but for those of kUnitIsOne; int8 codes are signed.
  constexpr std::uint32_t kTooMuch = std::bit_cast<std::uint32_t>(kUnitIsOne) * kOnes;
  constexpr std::uint32_t kSigns = kBits == 4 ? 0U : 0x80808080U;
  HSDP_UNROLL
  for (int w = 0; w < kWords; ++w) {
    std::uint32_t packed = 0;
    HSDP_UNROLL
    for (int k = kAWord - 1; k >= 0; --k) {
      const float moved = scaled[w * kAWord + k] + kCodeOffset<kBits>;
      packed = (packed << kBits) + std::bit_cast<std::uint32_t>(moved);
    }
    words[w] = (packed - kTooMuch) ^ kSigns;
  }
}

// The words of the first `count` codes; bits behind them are 0.
template <int kBits, int kElements, int kWords = kElements* kBits / 32>
HSDP_HOST_DEVICE inline void store_codes(const std::uint32_t (&words)[kWords], std::int32_t count,
                                         std::byte* to) {
  if (count == kElements) return kernels::move_group<4 * kWords, 4>(words, to, to);
  HSDP_UNROLL
  for (int w = 0; w < kWords; ++w) {
    const int bits = (count - w * (32 / kBits)) * kBits;
    if (bits <= 0) continue;
    const std::uint32_t mask = bits < 32 ? (1U << bits) - 1U : ~0U;
    reinterpret_cast<kernels::AccessOf4*>(to)[w].words[0] = words[w] & mask;
  }
}

// What kind of error a kernel feeds back.
enum class Feedback : std::uint8_t { kNone, kInt8, kF32 };

// kReceived: the bits of a code of the messages that are summed; 0: numbers are quantized.
template <int kReceived, Feedback kFeedback>
struct QuantizeBody {
  static constexpr int kElements = 32;  // of a piece: a group is a multiple
  static constexpr int kMostGroups = kTileElements / kLeastGroupSize;
  using Block = kernels::BlockOf<kTileElements / kElements>;
  static_assert(kMostGroups <= Block::kThreads);
  static constexpr int kResident = 4;  // blocks of a multiprocessor, at least
  struct Shared {
    std::uint32_t tops[kMostGroups];  // of groups that span more than a warp
    TileFigures figures;
  };

  const GroupTile* tiles = nullptr;
  std::int64_t tile_count = 0;
  PieceCut<kElements> cut;
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
      const GroupTile& tile = tiles[t];
      if (figures != nullptr) {
        block.each_thread([&](int thread) {
          if (thread == 0) shared.figures = {};
        });
      }
      Works works;
      Tops tops;
      read(block, tile, works, tops);
      if (out.format.code == Code::kBf16) {
        round(block, works, shared);
      } else {
        code(block, tile, works, tops, shared);
      }
      block.each_lane([&](int thread) {
        if (thread == 0) write_fillers(out, tile, TileCut(tile, cut).groups);
      });
      if (figures != nullptr) {
        block.wait_for_all();
        block.each_thread([&](int thread) {
          if (thread == 0) figures[t] = shared.figures;
        });
      }
    }
  }

 private:
  // What a thread has of its piece: addresses rather than the tile, which takes more registers.
  struct Work {
    std::int32_t first = 0;  // its first element, in the tile
    std::int32_t count = 0;
    bool begins = false;           // its group
    std::byte* codes = nullptr;    // in the message
    std::byte* scale = nullptr;    // of its group
    std::int32_t error_place = 0;  // in the error states, from their beginning
    std::int32_t error_group = 0;
    float h[kElements];  // then the next error
    std::uint32_t error[kElements / 4];
    float error_scale = 0.0F;
  };
  using Works = typename Block::template Registers<Work>;
  using Tops = typename Block::template Registers<std::uint32_t>;  // largest magnitudes, as bits

  HSDP_HOST_DEVICE void read(const Block& block, const GroupTile& tile, Works& works,
                             Tops& tops) const {
    block.each_lane([&](int thread) {
      Work& work = works[thread];
      const TileCut tile_cut(tile, cut);
      const Piece piece = piece_of(tile_cut, cut, thread);
      tops[thread] = 0;
      work.first = piece.first;
      work.count = piece.count;
      work.begins = piece.place == 0;
      if (piece.count == 0) return;
      const TilePlace to = place_of(out, tile, tile_cut.first_count);
      work.codes = to.codes_of(piece.group) + code_offset(out.format.code, piece.place);
      work.scale = to.scale_of(piece.group);
      work.error_place = tile.position + piece.first;
      work.error_group = tile.group + piece.group;
      if constexpr (kFeedback == Feedback::kInt8) {
        load_bytes(before.codes + place_in(before, work), work.count, work.error);
        work.error_scale = before.scales[work.error_group - before.group];
      }
      if constexpr (kReceived == 0) {
        load_floats(values + tile.element + piece.first, piece.count, work.h);
        HSDP_UNROLL
        for (float& value : work.h) value = value * factor;
      } else {
        const TilePlace from = place_of(received.first, tile, tile_cut.first_count);
        sum(from.codes_of(piece.group) + piece.place * kReceived / 8, from.scale_of(piece.group),
            work);
      }
      if constexpr (kFeedback != Feedback::kNone) {
        float error[kElements];
        decode_error(work, error);
        HSDP_UNROLL
        for (int k = 0; k < kElements; ++k) work.h[k] = work.h[k] + error[k];
      }
      tops[thread] = top_of(work);
    });
  }

  // Of the received messages, in their order; several are read before the first is used.
  HSDP_HOST_DEVICE void sum(const std::byte* codes, const std::byte* scale, Work& work) const {
    constexpr int kAtOnce = 16 / kReceived;
    constexpr int kWords = kElements * kReceived / 32;
    HSDP_UNROLL
    for (float& value : work.h) value = kernels::kNothing;
    for (int r = 0; r < received.count; r += kAtOnce) {
      std::uint32_t words[kAtOnce][kWords];
      float scales[kAtOnce];
      HSDP_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (r + k >= received.count) break;
        load_words<kWords, kElements>(codes, work.count, words[k]);
        scales[k] = load_scale(scale, received.first.format.scale_dtype);
        codes += received.distance;
        scale += received.distance;
      }
      HSDP_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (r + k >= received.count) break;
        HSDP_UNROLL
        for (int i = 0; i < kElements; ++i) {
          work.h[i] = work.h[i] + code_in<kReceived>(words[k], i) * scales[k];
        }
      }
    }
  }

  [[nodiscard]] HSDP_HOST_DEVICE static int code_offset(Code code, std::int32_t place) {
    return code == Code::kInt4 ? place / 2 : code == Code::kInt8 ? place : 2 * place;
  }
  [[nodiscard]] HSDP_HOST_DEVICE static std::int32_t place_in(const ErrorState& state,
                                                              const Work& work) {
    return work.error_place - state.position;
  }

  HSDP_HOST_DEVICE void decode_error(const Work& work, float (&error)[kElements]) const {
    if constexpr (kFeedback == Feedback::kInt8) {
      HSDP_UNROLL
      for (int k = 0; k < kElements; ++k) error[k] = code_in<8>(work.error, k) * work.error_scale;
    } else {
      load_floats(before.values + place_in(before, work), work.count, error);
    }
  }

  // What lies behind a short piece is no part of it.
  [[nodiscard]] HSDP_HOST_DEVICE static std::uint32_t top_of(Work& work) {
    if (work.count < kElements) {
      HSDP_UNROLL
      for (int k = 0; k < kElements; ++k) {
        if (k >= work.count) work.h[k] = 0.0F;
      }
    }
    float top = 0.0F;
    HSDP_UNROLL
    for (const float value : work.h) top = kernels::larger_magnitude(top, value);
    return std::bit_cast<std::uint32_t>(top);
  }

  // From the tops of pieces to those of their groups.
  HSDP_HOST_DEVICE void join(const Block& block, Tops& tops, Shared& shared) const {
    if (cut.shift >= 0 && cut.pieces <= kernels::kWarpThreads) {
      return block.raise_in_lanes(tops, cut.pieces);
    }
    block.each_thread([&](int thread) {
      if (thread < kMostGroups) shared.tops[thread] = 0;
    });
    block.each_thread(
        [&](int thread) { block.raise_to(tops[thread], &shared.tops[cut.group_of(thread)]); });
    block.each_thread([&](int thread) { tops[thread] = shared.tops[cut.group_of(thread)]; });
  }

  HSDP_HOST_DEVICE void round(const Block& block, Works& works, Shared& shared) const {
    block.each_lane([&](int thread) {
      const Work& work = works[thread];
      bool marked = false;
      TileFigures noted;
      const std::int32_t count = work.count;
      HSDP_UNROLL
      for (int first = 0; first < kElements; first += kernels::kGroupElements) {
        kernels::Group sent;
        HSDP_UNROLL
        for (int k = 0; k < kernels::kGroupElements; ++k) {
          if (first + k >= count) continue;
          const float h = work.h[first + k];
          sent.values[k] = kernels::rounded_through(h, Dtype::kBf16);
          if (magnitude_bits(sent.values[k]) >= kInfinityBits) {
            marked = true;
          } else if (figures != nullptr) {
            note(h, static_cast<double>(h) - sent.values[k], noted);
          }
        }
        if (first + kernels::kGroupElements <= count) {
          kernels::store_group(sent, work.codes + 2 * first, Dtype::kBf16);
          continue;
        }
        HSDP_UNROLL
        for (int k = 0; k < kernels::kGroupElements; ++k) {
          if (first + k < count)
            kernels::encode(sent.values[k], work.codes, first + k, Dtype::kBf16);
        }
      }
      add(block, noted, shared);
      block.raise(marked, nonfinite);
    });
  }

  HSDP_HOST_DEVICE static void note(double wanted, double missed, TileFigures& noted) {
    noted.missed += missed * missed;
    noted.wanted += wanted * wanted;
  }
  HSDP_HOST_DEVICE void add(const Block& block, const TileFigures& noted, Shared& shared) const {
    if (figures == nullptr) return;
    block.add(noted.missed, &shared.figures.missed);
    block.add(noted.wanted, &shared.figures.wanted);
  }

  HSDP_HOST_DEVICE void code(const Block& block, const GroupTile& tile, Works& works, Tops& tops,
                             Shared& shared) const {
    join(block, tops, shared);
    const ScalingRule rule = scaling_rule(out.format.code, out.format.scale_dtype);
    block.each_lane([&](int thread) {
      Work& work = works[thread];
      const std::uint32_t top = tops[thread];
      block.raise(work.count > 0 && top >= kInfinityBits, nonfinite);
      tops[thread] = 0;
      if (work.count == 0) return;
      const GroupScaling scaling = scaling_of(top, rule);
      if (work.begins) store_scale(scaling.scale, work.scale, out.format.scale_dtype);
      if (out.format.code == Code::kInt4) {
        code_piece<4>(block, scaling, work, shared);
      } else {
        code_piece<8>(block, scaling, work, shared);
      }
      if constexpr (kFeedback == Feedback::kInt8) tops[thread] = top_of(work);
    });
    if constexpr (kFeedback == Feedback::kInt8) {
      join(block, tops, shared);
      constexpr ScalingRule kRule = scaling_rule(Code::kInt8, Dtype::kF32);
      block.each_lane([&](int thread) {
        const Work& work = works[thread];
        if (work.count == 0) return;
        const GroupScaling scaling = scaling_of(tops[thread], kRule);
        if (work.begins) after.scales[work.error_group - after.group] = scaling.scale;
        code_error(tile, scaling, work);
      });
    }
  }

  // h * lift * inverse: what a code is the nearest integer of; 0 in a marked group.
  HSDP_HOST_DEVICE static void scale(const float (&h)[kElements], const GroupScaling& scaling,
                                     float (&scaled)[kElements]) {
    const bool marked = magnitude_bits(scaling.scale) >= kInfinityBits;
    HSDP_UNROLL
    for (int k = 0; k < kElements; ++k) {
      scaled[k] = marked ? 0.0F : h[k] * scaling.lift * scaling.inverse;
    }
  }

  template <int kBits>
  HSDP_HOST_DEVICE void code_piece(const Block& block, const GroupScaling& scaling, Work& work,
                                   Shared& shared) const {
    float scaled[kElements];
    scale(work.h, scaling, scaled);
    std::uint32_t words[kElements * kBits / 32];
    pack_codes<kBits>(scaled, words);
    store_codes<kBits, kElements>(words, work.count, work.codes);
    const auto decoded_at = [&](int k) {
      return (scaled[k] + kCodeOffset<kBits> - kCodeOffset<kBits>)*scaling.scale;
    };
    if (figures != nullptr) {
      TileFigures noted;
      HSDP_UNROLL
      for (int k = 0; k < kElements; ++k) {
        if (k < work.count) note(work.h[k], work.h[k] - decoded_at(k), noted);
      }
      if (magnitude_bits(scaling.scale) < kInfinityBits) add(block, noted, shared);
    }
    if constexpr (kFeedback != Feedback::kNone) {
      float error[kElements];
      decode_error(work, error);
      const float take = 1.0F - beta;
      HSDP_UNROLL
      for (int k = 0; k < kElements; ++k) {
        work.h[k] = next_error(error[k], work.h[k], decoded_at(k), beta, take);
      }
      if constexpr (kFeedback == Feedback::kF32) {
        store_floats(work.h, work.count, after.values + place_in(after, work));
      }
    }
  }

  HSDP_HOST_DEVICE void code_error(const GroupTile& tile, const GroupScaling& scaling,
                                   const Work& work) const {
    float scaled[kElements];
    scale(work.h, scaling, scaled);
    if (has_dither && magnitude_bits(scaling.scale) < kInfinityBits) {
      add_dither(tile.parameter, tile.flat_offset + work.first, scaled);
    }
    std::uint32_t words[kElements / 4];
    pack_codes<8>(scaled, words);
    store_bytes(words, work.count, after.codes + place_in(after, work));
  }

  // The bytes of the elements from `flat` on, which may begin amid those of one counter.
  HSDP_HOST_DEVICE void add_dither(std::int32_t parameter, std::int64_t flat,
                                   float (&to)[kElements]) const {
    constexpr int kWords = kElements / 4;
    constexpr int kDrawn = kWords + kDitherElements / 4;
    const auto past = static_cast<int>(flat % kDitherElements);
    std::uint32_t words[kDrawn] = {};
    HSDP_UNROLL
    for (int w = 0; w < kDrawn; w += 4) {
      if (w == kWords && past == 0) break;
      const PhiloxWords drawn = dither_words(dither, parameter, flat - past + 4 * w);
      HSDP_UNROLL
      for (int k = 0; k < 4; ++k) words[w + k] = drawn.words[k];
    }
    if (past != 0) skip_bytes(words, past);
    HSDP_UNROLL
    for (int k = 0; k < kElements; ++k) to[k] = to[k] + dither_of(words[k / 4], k % 4);
  }

  // The first kWords words are then those that begin `bytes` later, up to 15.
  template <int kDrawn>
  HSDP_HOST_DEVICE static void skip_bytes(std::uint32_t (&words)[kDrawn], int bytes) {
    HSDP_UNROLL
    for (int skipped = 2; skipped > 0; --skipped) {
      if ((bytes & 4 * skipped) == 0) continue;
      HSDP_UNROLL
      for (int w = 0; w + skipped < kDrawn; ++w) words[w] = words[w + skipped];
    }
    const int bits = bytes % 4 * 8;
    if (bits == 0) return;
    HSDP_UNROLL
    for (int w = 0; w + 1 < kDrawn; ++w) {
      words[w] = words[w] >> bits | words[w + 1] << (32 - bits);
    }
  }
};

struct DequantizeBody {
  static constexpr int kElements = 4;  // of a piece: a store of 16 bytes, beside those of the warp
  static constexpr int kResident = 6;
  static constexpr int kAtOnce = kTileElements / kElements / kernels::Block::kThreads;
  struct Shared {};

  const GroupTile* tiles = nullptr;
  std::int64_t tile_count = 0;
  PieceCut<kElements> cut;
  Message in;
  float* values = nullptr;
  std::uint32_t* nonfinite = nullptr;

  HSDP_HOST_DEVICE void operator()(const kernels::Block& block, Shared& /*shared*/) const {
    for (std::int64_t t = block.index(); t < tile_count; t += block.count()) {
      const GroupTile tile = tiles[t];
      const TileCut tile_cut(tile, cut);
      const TilePlace from = place_of(in, tile, tile_cut.first_count);
      block.each_lane([&](int thread) {
        bool marked = false;
        if (in.format.code == Code::kInt4) {
          marked = decode<4>(tile, tile_cut, from, thread);
        } else if (in.format.code == Code::kInt8) {
          marked = decode<8>(tile, tile_cut, from, thread);
        } else {
          marked = decode_bf16(tile, tile_cut, from, thread);
        }
        block.raise(marked, nonfinite);
      });
    }
  }

 private:
  // Whether a group is marked.
  template <int kBits>
  [[nodiscard]] HSDP_HOST_DEVICE bool decode(const GroupTile& tile, const TileCut& tile_cut,
                                             const TilePlace& from, int thread) const {
    Piece pieces[kAtOnce];
    std::uint32_t words[kAtOnce];
    float scales[kAtOnce];
    HSDP_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      pieces[i] = piece_of(tile_cut, cut, thread + i * kernels::Block::kThreads);
      if (pieces[i].count == 0) continue;
      const std::byte* const codes = from.codes_of(pieces[i].group) + pieces[i].place * kBits / 8;
      words[i] = kBits == 8 ? reinterpret_cast<const kernels::AccessOf4*>(codes)->words[0]
                            : reinterpret_cast<const kernels::AccessOf2*>(codes)->half;
      scales[i] = load_scale(from.scale_of(pieces[i].group), in.format.scale_dtype);
    }
    bool marked = false;
    HSDP_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (pieces[i].count == 0) continue;
      float decoded_values[kElements];
      HSDP_UNROLL
      for (int k = 0; k < kElements; ++k) {
        decoded_values[k] = code_in<kBits>(&words[i], k) * scales[i];
      }
      store_floats(decoded_values, pieces[i].count, values + tile.element + pieces[i].first);
      marked |= magnitude_bits(scales[i]) >= kInfinityBits;
    }
    return marked;
  }

  [[nodiscard]] HSDP_HOST_DEVICE bool decode_bf16(const GroupTile& tile, const TileCut& tile_cut,
                                                  const TilePlace& from, int thread) const {
    bool marked = false;
    HSDP_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const Piece piece = piece_of(tile_cut, cut, thread + i * kernels::Block::kThreads);
      const std::byte* const codes =
          from.codes_of(piece.group) + 2 * static_cast<std::ptrdiff_t>(piece.place);
      float rounded_values[kElements] = {};
      HSDP_UNROLL
      for (int k = 0; k < kElements; ++k) {
        if (k < piece.count) rounded_values[k] = kernels::decode(codes, k, Dtype::kBf16);
        marked |= magnitude_bits(rounded_values[k]) >= kInfinityBits;
      }
      store_floats(rounded_values, piece.count, values + tile.element + piece.first);
    }
    return marked;
  }
};

}  // namespace hsdp::quant
