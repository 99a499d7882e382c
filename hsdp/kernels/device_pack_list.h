// The body of the CUDA kernel that packs many contiguous gradients in one launch. Internal to
// hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_list.h"
#include "hsdp/kernels/device_pass.h"

namespace hsdp::kernels {

// What the gradients of one launch have in common.
struct PackKind {
  Dtype dtype = Dtype::kF32;
  Dtype add_dtype = Dtype::kF32;
  Dtype out_dtype = Dtype::kF32;
  float scale = 1.0F;

  friend bool operator==(const PackKind&, const PackKind&) = default;
};

struct PackItem {
  const void* gradient = nullptr;  // nullptr: zeros
  const void* add = nullptr;       // nullptr: nothing
  const void* base = nullptr;      // nullptr: nothing
  void* out = nullptr;
  std::uint32_t count = 0;
  std::uint32_t first_unit = 0;
};

constexpr int kMostPackItems = 99;  // keeps all arguments of a kernel within 4 KiB

template <int kElementBytes>
struct PackListBody {
  static constexpr int kResident = 4;  // minimum blocks per multiprocessor
  struct Shared {};
  static constexpr int kAtOnce = 8 / kElementBytes;  // groups in flight per thread
  static constexpr int kUnitGroups = kAtOnce * Block::kThreads;

  PackKind kind;
  int item_count = 0;
  std::uint32_t unit_count = 0;
  PackItem items[kMostPackItems];

  [[nodiscard]] static std::int64_t units_of(std::int64_t count) {
    return (groups_over(count) + kUnitGroups - 1) / kUnitGroups;
  }

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      for (std::int64_t unit = block.index(); unit < unit_count; unit += block.count()) {
        const PackItem& item = item_of(items, item_count, static_cast<std::uint32_t>(unit));
        pack(item, (unit - item.first_unit) * kUnitGroups + thread);
      }
    });
  }

 private:
  [[nodiscard]] HSDP_HOST_DEVICE DevicePass pass_of(const PackItem& item) const {
    DevicePass pass;
    pass.row_dtype = kind.dtype;
    pass.add = item.add;
    pass.add_dtype = kind.add_dtype;
    pass.base = item.base;
    pass.steps.result_scale = kind.scale;
    pass.outs[0] = item.out;
    pass.out_count = 1;
    pass.out_dtype = kind.out_dtype;
    pass.count = item.count;
    pass.head = elements_to_alignment(item.out, gradient_bytes(kind.out_dtype), pass.count);
    return pass;
  }

  HSDP_HOST_DEVICE void pack(const PackItem& item, std::int64_t first_group) const {
    const DevicePass pass = pass_of(item);
    const auto* const source = static_cast<const char*>(item.gradient);
    RawBytes<kElementBytes * kGroupElements> raw[kAtOnce];
    HSDP_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      const std::int64_t begin = group_begin(pass, first_group + std::int64_t{k} * Block::kThreads);
      if (source != nullptr && is_whole(begin, pass)) {
        raw[k] = load_raw<kElementBytes * kGroupElements>(source + begin * kElementBytes);
      }
    }
    HSDP_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      const std::int64_t begin = group_begin(pass, first_group + std::int64_t{k} * Block::kThreads);
      if (is_whole(begin, pass)) {
        finish_group(pass, begin,
                     source != nullptr ? decode_raw<kElementBytes>(raw[k], kind.dtype) : Group{});
        continue;
      }
      const std::int64_t from = begin < 0 ? 0 : begin;
      const std::int64_t end = begin + kGroupElements;
      const std::int64_t to = end < pass.count ? end : pass.count;
      for (std::int64_t i = from; i < to; ++i) {
        finish_element(pass, i, source != nullptr ? decode(source, i, kind.dtype) : 0.0F);
      }
    }
  }

  [[nodiscard]] HSDP_HOST_DEVICE static bool is_whole(std::int64_t begin, const DevicePass& pass) {
    return begin >= 0 && begin + kGroupElements <= pass.count;
  }
};

}  // namespace hsdp::kernels
