// The body of the CUDA kernel that sums rows of f64 and i64. Internal to hsdp/kernels.
#pragma once

#include <cstdint>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_pass.h"

namespace hsdp::kernels {

// f64 and i64, at any speed: rows -> sum -> outputs. T is how the sum is done.
template <class T>
struct WideSumBody {
  static constexpr int kResident = 1;  // blocks of a multiprocessor, at least
  struct Shared {};
  ListedRows rows;
  int row_count = 0;
  T* outs[kMostOuts] = {};
  int out_count = 0;
  std::int64_t count = 0;
  std::uint32_t* nonfinite = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      bool bad = false;
      for (std::int64_t i = block.rank(thread); i < count; i += block.size()) {
        T sum = static_cast<const T*>(rows.at(0))[i];
        for (int row = 1; row < row_count; ++row) sum += static_cast<const T*>(rows.at(row))[i];
        for (int o = 0; o < out_count; ++o) outs[o][i] = sum;
        bad = bad || !(sum * T{} == T{});  // NaN from NaN and infinity
      }
      block.raise(bad, nonfinite);
    });
  }
};

}  // namespace hsdp::kernels
