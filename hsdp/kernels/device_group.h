// Groups of eight elements: what one thread of a kernel reads and writes at once, in accesses of 16
// bytes where the address allows. Addresses are multiples of the element size. Internal to
// hsdp/kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include "hsdp/kernels/arithmetic.h"

// For loops over a thread's registers: they have no address, so indices must be constants.
#if defined(__CUDA_ARCH__)
#define HSDP_UNROLL _Pragma("unroll")
// Lets `rounds` iterations of the loop overlap.
#define HSDP_UNROLL_BY(rounds) HSDP_PRAGMA(unroll rounds)
#define HSDP_PRAGMA(words) _Pragma(#words)
#else
#define HSDP_UNROLL
#define HSDP_UNROLL_BY(rounds)
#endif

namespace hsdp::kernels {

constexpr int kGroupElements = 8;
constexpr int kAccessBytes = 16;

HSDP_HOST_DEVICE constexpr int gradient_bytes(Dtype dtype) {
  if (dtype == Dtype::kF64) return 8;
  return dtype == Dtype::kF32 ? 4 : 2;
}

// How many of the `count` elements at `data` come before the first one aligned to kAccessBytes; 0
// if none can be aligned.
HSDP_HOST_DEVICE inline std::int64_t elements_to_alignment(const void* data, int element_bytes,
                                                           std::int64_t count) {
  const auto past = static_cast<int>(reinterpret_cast<std::uintptr_t>(data) % kAccessBytes);
  const int missing = (kAccessBytes - past) % kAccessBytes;
  if (missing % element_bytes != 0) return 0;
  return missing / element_bytes < count ? missing / element_bytes : count;
}

template <int kBytes>
struct alignas(16) RawBytes {
  std::uint32_t words[kBytes / 4];
};

// May alias any object.
struct __attribute__((may_alias, aligned(16))) AccessOf16 {
  std::uint32_t words[4];
};
struct __attribute__((may_alias)) AccessOf4 {
  std::uint32_t words[1];
};
struct __attribute__((may_alias)) AccessOf2 {
  std::uint16_t half;
};

// Copies kBytes in accesses of one width; both addresses must be multiples of it.
template <class Access, int kBytes>
HSDP_HOST_DEVICE inline void move_bytes(const void* from, void* to) {
  HSDP_UNROLL
  for (int i = 0; i < kBytes / static_cast<int>(sizeof(Access)); ++i) {
    static_cast<Access*>(to)[i] = static_cast<const Access*>(from)[i];
  }
}

// One end is registers; the address of `memory` decides the width. In passes over whole arrays all
// threads of a grid take the same branch, since their addresses are multiples of 16 bytes apart.
// The host needs no widths, and its compiler may merge branches that differ only in alignment.
template <int kBytes>
HSDP_HOST_DEVICE inline void move_group(const void* from, void* to,
                                        [[maybe_unused]] const void* memory) {
#if defined(__CUDA_ARCH__)
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  if (address % 16 == 0) {
    move_bytes<AccessOf16, kBytes>(from, to);
  } else if (address % 4 == 0) {
    move_bytes<AccessOf4, kBytes>(from, to);
  } else {
    move_bytes<AccessOf2, kBytes>(from, to);
  }
#else
  std::memcpy(to, from, kBytes);
#endif
}

template <int kBytes>
HSDP_HOST_DEVICE inline RawBytes<kBytes> load_raw(const void* from) {
  RawBytes<kBytes> raw;
  move_group<kBytes>(from, raw.words, from);
  return raw;
}

template <int kBytes>
HSDP_HOST_DEVICE inline void store_raw(const RawBytes<kBytes>& raw, void* to) {
  move_group<kBytes>(raw.words, to, to);
}

template <int kElementBytes>
HSDP_HOST_DEVICE inline std::uint32_t bits_in(const std::uint32_t* words, int i) {
  if constexpr (kElementBytes == 4) {
    return words[i];
  } else {
    return (words[i / 2] >> (i % 2 * 16)) & 0xffffU;
  }
}

HSDP_HOST_DEVICE inline float decode_bits(std::uint32_t bits, Dtype dtype) {
  if (dtype == Dtype::kF32) return std::bit_cast<float>(bits);
  const auto half = static_cast<std::uint16_t>(bits);
  return dtype == Dtype::kBf16 ? to_float(Bf16{half}) : decode_f16(half);
}

struct Group {
  float values[kGroupElements];
};

template <int kElementBytes>
HSDP_HOST_DEVICE inline Group decode_raw(const RawBytes<kElementBytes * kGroupElements>& raw,
                                         Dtype dtype) {
  Group group;
  HSDP_UNROLL
  for (int i = 0; i < kGroupElements; ++i) {
    group.values[i] = decode_bits(bits_in<kElementBytes>(raw.words, i), dtype);
  }
  return group;
}

HSDP_HOST_DEVICE inline const void* at_element(const void* data, std::int64_t i, Dtype dtype) {
  return static_cast<const char*>(data) + i * gradient_bytes(dtype);
}
HSDP_HOST_DEVICE inline void* at_element(void* data, std::int64_t i, Dtype dtype) {
  return static_cast<char*>(data) + i * gradient_bytes(dtype);
}

HSDP_HOST_DEVICE inline Group load_group(const void* from, Dtype dtype) {
  if (dtype == Dtype::kF32) return decode_raw<4>(load_raw<32>(from), dtype);
  return decode_raw<2>(load_raw<16>(from), dtype);
}

HSDP_HOST_DEVICE inline void store_group(const Group& group, void* to, Dtype dtype) {
  if (dtype == Dtype::kF32) {
    RawBytes<32> raw;
    HSDP_UNROLL
    for (int i = 0; i < kGroupElements; ++i) {
      raw.words[i] = std::bit_cast<std::uint32_t>(group.values[i]);
    }
    store_raw<32>(raw, to);
    return;
  }
  RawBytes<16> raw;
  if (dtype == Dtype::kBf16) {
    HSDP_UNROLL
    for (int i = 0; i < kGroupElements; i += 2) {
      raw.words[i / 2] = encode_two_bf16(group.values[i], group.values[i + 1]);
    }
  } else {
    HSDP_UNROLL
    for (int i = 0; i < kGroupElements; i += 2) {
      const std::uint32_t high = encode_f16(group.values[i + 1]);
      raw.words[i / 2] = encode_f16(group.values[i]) | high << 16;
    }
  }
  store_raw<16>(raw, to);
}

}  // namespace hsdp::kernels
