// What the clipping kernels compute, also on the host. Internal to hsdp/kernels.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "hsdp/kernels/clip.h"
#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_group.h"

namespace hsdp::kernels {

// One thread is enough: the order matters, and there is only one value per parameter.
HSDP_HOST_DEVICE inline double ordered_sum(const double* values, std::int64_t count) {
  constexpr int kAtOnce = 8;
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; i += kAtOnce) {
    double loaded[kAtOnce];
    HSDP_UNROLL
    for (int k = 0; k < kAtOnce; ++k) loaded[k] = i + k < count ? values[i + k] : 0.0;
    HSDP_UNROLL
    for (const double value : loaded) sum += value;
  }
  return sum;
}

HSDP_HOST_DEVICE inline void compute_clip_factor(const ClipFactor& args) {
  const double norm = std::sqrt(ordered_sum(args.squares, args.count));
  *args.norm = norm;
  const double factor = args.max_norm / (norm + args.epsilon);
  const double at_most_one = factor < 1.0 ? factor : 1.0;
  if (args.factor != nullptr) *args.factor = at_most_one;
  if (args.narrow_factor != nullptr) *args.narrow_factor = static_cast<float>(at_most_one);
}

struct OrderedSumBody {
  static constexpr int kResident = 1;  // minimum blocks per multiprocessor
  struct Shared {};

  const double* values = nullptr;
  std::int64_t count = 0;
  double* sum = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      if (block.rank(thread) == 0) *sum = ordered_sum(values, count);
    });
  }
};

struct ClipFactorBody {
  static constexpr int kResident = 1;
  struct Shared {};

  ClipFactor args;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      if (block.rank(thread) == 0) compute_clip_factor(args);
    });
  }
};

struct ScaleByBody {
  static constexpr int kResident = 4;
  static constexpr int kElements = 4;
  struct Shared {};

  float* values = nullptr;
  std::int64_t count = 0;
  std::int64_t head = 0;           // elements before the first aligned one
  const double* factor = nullptr;  // rounded to fp32

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    const auto by = static_cast<float>(*factor);
    if (by == 1.0F) return;
    block.each_thread([this, &block, by](int thread) {
      const std::int64_t rank = block.rank(thread);
      const std::int64_t parts = (count - head) / kElements;
      for (std::int64_t part = rank; part < parts; part += block.size()) {
        float* const place = values + head + part * kElements;
        RawBytes<16> raw = load_raw<16>(place);
        HSDP_UNROLL
        for (std::uint32_t& word : raw.words) {
          word = std::bit_cast<std::uint32_t>(std::bit_cast<float>(word) * by);
        }
        store_raw(raw, place);
      }
      const std::int64_t i = rank < head ? rank : parts * kElements + rank;
      if (i < count) values[i] *= by;
    });
  }
};

}  // namespace hsdp::kernels
