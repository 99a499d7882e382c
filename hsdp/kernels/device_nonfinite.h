// The bodies of the CUDA kernels that detect and report NaN and infinity. Internal to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_group.h"

namespace hsdp::kernels {

template <int kElementBytes>
struct NonfiniteBody {
  static constexpr int kResident = 4;  // minimum blocks per multiprocessor
  static constexpr int kElements = 16 / kElementBytes;
  static constexpr int kAtOnce = 4;
  struct Shared {};

  const char* values = nullptr;
  Dtype dtype = Dtype::kF32;
  std::int64_t count = 0;
  std::int64_t head = 0;  // elements before the first aligned one
  std::uint32_t* nonfinite = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      const std::int64_t rank = block.rank(thread);
      const std::int64_t parts = (count - head) / kElements;
      bool bad = false;
      for (std::int64_t first = rank; first < parts; first += kAtOnce * block.size()) {
        RawBytes<16> raw[kAtOnce];
        HSDP_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          const std::int64_t part = first + k * block.size();
          raw[k] = part < parts ? load_raw<16>(values + head * kElementBytes + part * 16)
                                : RawBytes<16>{};
        }
        HSDP_UNROLL
        for (const RawBytes<16>& part : raw) {
          HSDP_UNROLL
          for (int i = 0; i < kElements; ++i) {
            bad = bad || is_bad(bits_in<kElementBytes>(part.words, i));
          }
        }
      }
      const std::int64_t i = rank < head ? rank : parts * kElements + rank;
      if (i < count) {
        const float value = decode(values, i, dtype);
        bad = bad || magnitude_bits(value) >= nonfinite_magnitude(Dtype::kF32);
      }
      block.raise(bad, nonfinite);
    });
  }

 private:
  [[nodiscard]] HSDP_HOST_DEVICE bool is_bad(std::uint32_t bits) const {
    if (dtype == Dtype::kF32) return (bits & 0x7f800000U) == 0x7f800000U;
    const std::uint32_t infinity = dtype == Dtype::kBf16 ? 0x7f80U : 0x7c00U;
    return (bits & infinity) == infinity;
  }
};

// A flag as a number.
HSDP_HOST_DEVICE inline float indicated(const void* word) {
  const std::uint32_t bits = *static_cast<const volatile std::uint32_t*>(word);
  return (bits & 0x7fffffffU) != 0 ? 1.0F : 0.0F;  // -0.0 is 0
}

struct IndicateBody {
  static constexpr int kResident = 1;
  struct Shared {};

  const void* word = nullptr;
  float* out = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      if (block.rank(thread) == 0) *out = indicated(word);
    });
  }
};

struct PoisonBody {
  static constexpr unsigned char kByte = 0xff;  // NaN in every float format
  static constexpr int kResident = 1;
  static constexpr std::int64_t kBlocks = 32;  // each reads the word over the bus
  struct Shared {};

  const std::uint32_t* word = nullptr;
  char* out = nullptr;
  std::int64_t bytes = 0;
  std::uint32_t* nonfinite = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      if (block.read(word) == 0) return;
      for (std::int64_t i = block.rank(thread); i < bytes; i += block.size()) {
        out[i] = static_cast<char>(kByte);
      }
      if (nonfinite != nullptr) block.set(nonfinite);
    });
  }
};

}  // namespace hsdp::kernels
