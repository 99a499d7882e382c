// Numbers for stochastic rounding. They depend only on an element's place, not on threads, block
// shapes or order.
//
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Sixteen
// elements share a counter {element / 16, parameter, step, stream}; their bytes are those of the
// four words, in little-endian order.
#pragma once

#include <cstdint>

#include "hsdp/dtype.h"

namespace hsdp::quant {

struct Dither {
  std::uint64_t seed = 0;
  std::uint32_t step = 0;
  std::uint32_t stream = 0;
};

constexpr int kDitherElements = 16;  // per counter

struct PhiloxWords {
  std::uint32_t words[4];
};

HSDP_HOST_DEVICE constexpr PhiloxWords philox(PhiloxWords counter, std::uint64_t seed) {
  auto key0 = static_cast<std::uint32_t>(seed);
  auto key1 = static_cast<std::uint32_t>(seed >> 32);
  std::uint32_t(&c)[4] = counter.words;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{c[0]} * 0xd2511f53U;
    const std::uint64_t b = std::uint64_t{c[2]} * 0xcd9e8d57U;
    c[0] = static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ key0;
    c[2] = static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ key1;
    c[1] = static_cast<std::uint32_t>(b);
    c[3] = static_cast<std::uint32_t>(a);
    key0 += 0x9e3779b9U;
    key1 += 0xbb67ae85U;
  }
  return counter;
}

// The words for the 16 elements around element `flat_offset` of the flattened parameter.
HSDP_HOST_DEVICE constexpr PhiloxWords dither_words(const Dither& dither, std::int32_t parameter,
                                                    std::int64_t flat_offset) {
  return philox({{static_cast<std::uint32_t>(flat_offset / kDitherElements),
                  static_cast<std::uint32_t>(parameter), dither.step, dither.stream}},
                dither.seed);
}

// (byte - 127.5) / 256, in (-0.5, 0.5), of element `i` among the 16.
HSDP_HOST_DEVICE constexpr float dither_of(const PhiloxWords& words, int i) {
  const std::uint32_t byte = (words.words[i / 4] >> (i % 4 * 8)) & 0xffU;
  return (static_cast<float>(byte) - 127.5F) * 0x1p-8F;
}

}  // namespace hsdp::quant
