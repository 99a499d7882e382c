// The arithmetic of digests, and the body of their CUDA kernel. Internal to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_group.h"

namespace hsdp::kernels {

constexpr std::int64_t kDigestBytes = 8;  // per place

// A bijection in `word`.
HSDP_HOST_DEVICE inline std::uint64_t digest_of_word(std::uint64_t word, std::uint64_t place) {
  std::uint64_t mixed = word + (place + 1) * 0x9e3779b97f4a7c15U;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
  return mixed ^ (mixed >> 31);
}

// The word at the last place, padded with zeros past the end of the memory.
HSDP_HOST_DEVICE inline std::uint64_t last_digest_word(const char* data, std::int64_t bytes) {
  std::uint64_t word = 0;
  for (std::int64_t i = 0; i < bytes; ++i) {
    word |= static_cast<std::uint64_t>(static_cast<unsigned char>(data[i])) << (8 * i);
  }
  return word;
}

struct DigestBody {
  static constexpr int kResident = 4;  // minimum blocks per multiprocessor
  static constexpr int kAtOnce = 4;
  static constexpr std::int64_t kPartBytes = 2 * kDigestBytes;
  struct Shared {
    std::uint64_t sum;
  };

  const char* data = nullptr;
  std::int64_t bytes = 0;
  std::uint64_t place = 0;
  std::uint64_t* sum = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& shared) const {
    block.each_thread([&](int thread) {
      if (thread == 0) shared.sum = 0;
    });
    block.each_thread([&](int thread) { block.add(own_sum(block, thread), &shared.sum); });
    block.each_thread([&](int thread) {
      if (thread == 0) block.add(shared.sum, sum);
    });
  }

 private:
  [[nodiscard]] HSDP_HOST_DEVICE std::uint64_t own_sum(const Block& block, int thread) const {
    const std::int64_t rank = block.rank(thread);
    const std::int64_t parts = bytes / kPartBytes;
    std::uint64_t own = 0;
    for (std::int64_t first = rank; first < parts; first += kAtOnce * block.size()) {
      RawBytes<kPartBytes> raw[kAtOnce];
      HSDP_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const std::int64_t part = first + k * block.size();
        if (part < parts) raw[k] = load_raw<kPartBytes>(data + part * kPartBytes);
      }
      HSDP_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        const std::int64_t part = first + k * block.size();
        if (part >= parts) break;
        const auto at = place + 2 * static_cast<std::uint64_t>(part);
        own += digest_of_word(joined(raw[k].words[0], raw[k].words[1]), at);
        own += digest_of_word(joined(raw[k].words[2], raw[k].words[3]), at + 1);
      }
    }
    if (rank != 0) return own;
    for (std::int64_t done = parts * kPartBytes; done < bytes; done += kDigestBytes) {
      const std::int64_t left = bytes - done < kDigestBytes ? bytes - done : kDigestBytes;
      own += digest_of_word(last_digest_word(data + done, left),
                            place + static_cast<std::uint64_t>(done / kDigestBytes));
    }
    return own;
  }
  [[nodiscard]] HSDP_HOST_DEVICE static std::uint64_t joined(std::uint32_t low,
                                                             std::uint32_t high) {
    return static_cast<std::uint64_t>(high) << 32 | low;
  }
};

}  // namespace hsdp::kernels
