// The kernels of block quantization with error feedback, each one pass over memory:
//
//   quantize    numbers, or the sum of received messages -> + error -> a message and the new error
//   dequantize  a message, or the sum of received ones -> numbers
//
// The arithmetic is that of group_arithmetic.h, and the scalar functions below define it: the bits
// do not depend on SIMD width, tile, thread or device [Note: levels and scales].
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "hsdp/device/stream.h"
#include "quant/dither.h"
#include "quant/group_format.h"
#include "quant/group_map.h"

namespace hsdp::quant {

// A message or a part of one, in the memory of the stream's device, 2-byte aligned (GPU: 16).
struct Message {
  GroupFormat format;
  std::byte* data = nullptr;
  std::int64_t begin = 0;            // offset of `data` in the whole message, in bytes
  const MessageRow* rows = nullptr;  // one per owner, from its layout; on the same device
};

// The error state of a map's elements, or of some of its owners: int8 codes, one per element, with
// one fp32 scale per group; or fp32 values. All null: no error feedback.
struct ErrorState {
  std::int8_t* codes = nullptr;
  float* scales = nullptr;
  float* values = nullptr;
  // Its first element and first group, in the map.
  std::int32_t position = 0;
  std::int32_t group = 0;

  [[nodiscard]] HSDP_HOST_DEVICE bool exists() const {
    return codes != nullptr || values != nullptr;
  }
};

// |h - d|^2 and |h|^2 of a tile's elements, without marked groups. Reported to users, so fp32
// precision is enough.
struct TileFigures {
  double missed = 0.0;
  double wanted = 0.0;
};

// Consecutive messages in one layout: what an owner receives from all replicas.
struct ReceivedMessages {
  Message first;
  std::int64_t distance = 0;  // bytes from one message to the next
  int count = 0;

  [[nodiscard]] HSDP_HOST_DEVICE Message at(int number) const {
    Message message = first;
    message.data += number * distance;
    return message;
  }
};

struct Quantize {
  std::span<const GroupTile> tiles;  // on the stream's device
  int group_size = 64;
  // Source: values[tile.element + i] * factor; nullptr: the sum of `received`, in order.
  const float* values = nullptr;
  float factor = 1.0F;
  ReceivedMessages received;
  // Read and written; they may be the same. The bf16 format takes none.
  ErrorState before;
  ErrorState after;
  float beta = 0.8F;
  const Dither* dither = nullptr;  // to round int8 errors stochastically
  Message out;
  TileFigures* figures = nullptr;                   // one per tile
  std::atomic<std::uint32_t>* nonfinite = nullptr;  // set to 1 if a group is marked; on CUDA a
                                                    // make_flag() word of the device
};

struct Dequantize {
  std::span<const GroupTile> tiles;
  int group_size = 64;
  ReceivedMessages in;  // summed in order; only one in the format bf16
  float* values = nullptr;
  std::int64_t begin = 0;                           // to values[tile.element - begin + i]
  std::atomic<std::uint32_t>* nonfinite = nullptr;  // set to 1 for a value that is not finite
};

// On the calling thread, in host memory. Also writes a message's padding, so that no earlier bytes
// remain.
void quantize(const Quantize& args);
void dequantize(const Dequantize& args);

// Inside a task of `stream`, in memory of its device [Note: kernels on a stream].
void quantize(const Quantize& args, const Stream& stream);
void dequantize(const Dequantize& args, const Stream& stream);

// The scalar definitions that every implementation must equal bit for bit.
void quantize_reference(const Quantize& args);
void dequantize_reference(const Dequantize& args);

}  // namespace hsdp::quant
