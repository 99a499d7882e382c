// Random settings of the kernels: maps, formats, numbers and errors. For tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "quant/dither.h"
#include "quant/group_map.h"
#include "quantized_memory.h"
#include "tests/kernels/hostile_value.h"

namespace hsdp::quant {

inline constexpr Code kIntegers[] = {Code::kInt4, Code::kInt8};

inline std::vector<ParameterRange> some_runs(std::mt19937& random, int size) {
  std::vector<ParameterRange> runs(1 + random() % 4);
  std::int64_t offset = 0;
  for (ParameterRange& run : runs) {
    offset += static_cast<std::int64_t>(random() % 2) * 5;
    const auto most = static_cast<unsigned>(random() % 3 == 0 ? 9000 : 3 * size);
    run = {.parameter = static_cast<int>(random() % 100),
           .offset = offset,
           .count = static_cast<std::int64_t>(random() % most),
           .flat_offset = static_cast<std::int64_t>(random() % 2 * random() % 9000)};
    offset += run.count;
  }
  return runs;
}

// Numbers of one magnitude, of all magnitudes, or difficult ones.
inline float some_value(std::mt19937& random, unsigned kind) {
  if (kind == 0) return kernels::hostile_value(random);
  const float value = std::normal_distribution<float>()(random);
  if (kind == 1) return value * 1e-3F;
  if (kind == 2) return std::ldexp(value, static_cast<int>(random() % 250) - 140);
  return std::ldexp(value, -140);  // subnormal
}

struct Setting {
  explicit Setting(std::mt19937& random)
      : format{.code = kIntegers[random() % 2],
               .group_size = std::vector{32, 64, 96, 128, 320, 4096}[random() % 6],
               .scale_dtype = random() % 2 == 0 ? Dtype::kBf16 : Dtype::kF32},
        kind(static_cast<ErrorKind>(random() % 3)),
        map(some_runs(random, format.group_size), format.group_size,
            1 + static_cast<int>(random() % 4)),
        span(1),
        dither{random(), static_cast<std::uint32_t>(random()), 3} {
    for (const GroupTile& tile : map.tiles()) span = std::max(span, tile.element + tile.count);
    has_dither = kind == ErrorKind::kInt8 && random() % 3 == 0;
    beta = std::vector{0.0F, 0.5F, 0.8F, 0.95F}[random() % 4];
  }

  GroupFormat format;
  ErrorKind kind;
  GroupMap map;
  std::int64_t span;
  Dither dither;
  bool has_dither;
  float beta;
};

inline void fill_random(ErrorMemory& error, std::mt19937& random) {
  for (std::size_t i = 0; i < error.codes.size(); ++i) {
    error.codes[i] = static_cast<std::int8_t>(static_cast<int>(random() % 255) - 127);
    error.values[i] = some_value(random, 1);
  }
  for (std::size_t i = 0; i < error.scales.size(); ++i) {
    error.scales[i] = std::abs(some_value(random, random() % 2 + 1)) / 127.0F;
  }
}

}  // namespace hsdp::quant
