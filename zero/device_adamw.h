// The bodies of the CUDA kernels of AdamW, on the host too. Internal to zero/.
#pragma once

#include <bit>
#include <cstdint>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_group.h"
#include "zero/adamw_kernels.h"

namespace hsdp::zero {

using kernels::Block;

struct AdamWTickBody {
  static constexpr int kResident = 1;  // blocks per multiprocessor, at least
  struct Shared {};

  AdamWTick args;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      if (block.rank(thread) == 0) tick(args);
    });
  }
};

// Updates several slices in one launch, as a model has many small parameters. Each is cut into
// pieces, which the blocks share.
struct AdamWUpdateBody {
  static constexpr int kResident = 4;
  static constexpr int kElements = 4;  // per thread at once
  static constexpr std::int64_t kPieceElements = std::int64_t{kElements} * Block::kThreads;
  static constexpr int kMostSlices = 64;  // what an argument of 4 KiB holds
  struct Shared {};

  AdamWSlice slices[kMostSlices];
  std::int64_t first_pieces[kMostSlices + 1] = {};  // of each slice, and the number of pieces
  int slice_count = 0;
  const AdamWClock* clock = nullptr;

  void add(const AdamWSlice& slice) {
    slices[slice_count] = slice;
    first_pieces[slice_count + 1] =
        first_pieces[slice_count] + (slice.count + kPieceElements - 1) / kPieceElements;
    ++slice_count;
  }
  [[nodiscard]] HSDP_HOST_DEVICE std::int64_t piece_count() const {
    return first_pieces[slice_count];
  }

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    if (clock->numbers.skip != 0) return;
    const AdamWNumbers numbers = clock->numbers;
    int s = 0;
    for (std::int64_t piece = block.index(); piece < piece_count(); piece += block.count()) {
      while (first_pieces[s + 1] <= piece) ++s;
      const std::int64_t begin = (piece - first_pieces[s]) * kPieceElements;
      block.each_thread([&](int thread) {
        update(slices[s], begin + std::int64_t{thread} * kElements, numbers);
      });
    }
  }

 private:
  using Raw = kernels::RawBytes<4 * kElements>;

  HSDP_HOST_DEVICE static void update(const AdamWSlice& slice, std::int64_t begin,
                                      const AdamWNumbers& numbers) {
    if (begin + kElements <= slice.count) return update_whole(slice, begin, numbers);
    for (std::int64_t i = begin; i < slice.count; ++i) {
      const AdamWElement element = updated({slice.parameter[i], slice.first[i], slice.second[i]},
                                           slice.gradient[i], numbers);
      slice.parameter[i] = element.parameter;
      slice.first[i] = element.first;
      slice.second[i] = element.second;
    }
  }

  HSDP_HOST_DEVICE static void update_whole(const AdamWSlice& slice, std::int64_t begin,
                                            const AdamWNumbers& numbers) {
    const Raw gradients = kernels::load_raw<4 * kElements>(slice.gradient + begin);
    Raw parameters = kernels::load_raw<4 * kElements>(slice.parameter + begin);
    Raw firsts = kernels::load_raw<4 * kElements>(slice.first + begin);
    Raw seconds = kernels::load_raw<4 * kElements>(slice.second + begin);
    HSDP_UNROLL
    for (int k = 0; k < kElements; ++k) {
      const AdamWElement element =
          updated({number(parameters, k), number(firsts, k), number(seconds, k)},
                  number(gradients, k), numbers);
      parameters.words[k] = std::bit_cast<std::uint32_t>(element.parameter);
      firsts.words[k] = std::bit_cast<std::uint32_t>(element.first);
      seconds.words[k] = std::bit_cast<std::uint32_t>(element.second);
    }
    kernels::store_raw(parameters, slice.parameter + begin);
    kernels::store_raw(firsts, slice.first + begin);
    kernels::store_raw(seconds, slice.second + begin);
  }

  [[nodiscard]] HSDP_HOST_DEVICE static float number(const Raw& raw, int k) {
    return std::bit_cast<float>(raw.words[k]);
  }
};

}  // namespace hsdp::zero
