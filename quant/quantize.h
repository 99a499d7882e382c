// The kernels of block quantization with error feedback, each one pass over memory:
//
//   quantize    numbers, or the sum of received messages -> + error -> a message and the new error
//   dequantize  a message -> numbers
//
// The arithmetic is that of group_arithmetic.h, and the scalar functions below are its definition:
// the bits depend on neither SIMD width, tile, thread nor device [Note: levels and scales].
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

// A message or a part of one, in memory of the stream's device, 2-byte aligned (GPU: 16).
struct Message {
  GroupFormat format;
  std::byte* data = nullptr;
  std::int64_t begin = 0;            // of `data`, in the whole message: bytes
  const MessageRow* rows = nullptr;  // of its layout, a row for each owner; on the same device
};

// The error state of a map's elements, or of those of some of its owners: either int8 codes, one an
// element, with an fp32 scale a group, or fp32 values. All null: no error feedback.
struct ErrorState {
  std::int8_t* codes = nullptr;
  float* scales = nullptr;
  float* values = nullptr;
  // The first element and the first group that it holds, in the map.
  std::int32_t position = 0;
  std::int32_t group = 0;

  [[nodiscard]] HSDP_HOST_DEVICE bool exists() const {
    return codes != nullptr || values != nullptr;
  }
};

// |h - d|^2 and |h|^2 of a tile's elements but for those of marked groups, to fp32's precision:
// figures for people.
struct TileFigures {
  double missed = 0.0;
  double wanted = 0.0;
};

// Messages in one layout that follow one another: what an owner gets from all replicas.
struct ReceivedMessages {
  Message first;
  std::int64_t distance = 0;  // bytes from one to the next
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
  // values[tile.element + i] * factor; nullptr: the sum of `received`, in their order.
  const float* values = nullptr;
  float factor = 1.0F;
  ReceivedMessages received;
  // Read and written; they may be the same. Format bf16 takes none.
  ErrorState before;
  ErrorState after;
  float beta = 0.8F;
  const Dither* dither = nullptr;  // rounds int8 errors stochastically
  Message out;
  TileFigures* figures = nullptr;                   // one a tile
  std::atomic<std::uint32_t>* nonfinite = nullptr;  // set to 1 where a group is marked; on CUDA a
                                                    // make_flag() word of the device
};

struct Dequantize {
  std::span<const GroupTile> tiles;
  int group_size = 64;
  Message in;
  float* values = nullptr;  // to values[tile.element + i]
  std::atomic<std::uint32_t>* nonfinite = nullptr;
};

// On the calling thread, in host memory. A message's fillers are written, too: it has no bytes of
// before.
void quantize(const Quantize& args);
void dequantize(const Dequantize& args);

// Inside a task of `stream`, in memory of its device [Note: kernels on a stream].
void quantize(const Quantize& args, const Stream& stream);
void dequantize(const Dequantize& args, const Stream& stream);

// The scalar definitions that every implementation must equal bit for bit.
void quantize_reference(const Quantize& args);
void dequantize_reference(const Dequantize& args);

}  // namespace hsdp::quant
