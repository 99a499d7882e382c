// The bodies of the CUDA kernels for f64 gradients and i64 sums. They are simple, since few jobs
// train in these types. Internal to hsdp/kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hsdp/kernels/device_block.h"
#include "hsdp/kernels/device_pass.h"
#include "hsdp/kernels/device_plan.h"

namespace hsdp::kernels {

// rows -> sum -> finish_wide() -> outputs. T is the type of the sum.
template <class T, class Rows = EvenRows>
struct WidePassBody {
  static constexpr int kResident = 1;  // minimum blocks per multiprocessor
  struct Shared {};
  Rows rows;
  int row_count = 0;                        // 0: the sum is zero
  GatherPlan gather{.dimension_count = 0};  // for the first row, if it is not contiguous
  const T* add = nullptr;
  const T* base = nullptr;  // if set, the sums are those of the rows and `add`
  double divisor = 1.0;
  double multiplier = 1.0;
  T* outs[kMostOuts] = {};
  int out_count = 0;
  std::int64_t count = 0;
  std::uint32_t* nonfinite = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    block.each_thread([this, &block](int thread) {
      bool bad = false;
      for (std::int64_t i = block.rank(thread); i < count; i += block.size()) {
        const T result = finished(i, sum(i));
        for (int o = 0; o < out_count; ++o) outs[o][i] = result;
        bad = bad || !(result * T{} == T{});  // NaN from NaN and infinity
      }
      block.raise(bad, nonfinite);
    });
  }

 private:
  [[nodiscard]] HSDP_HOST_DEVICE T sum(std::int64_t i) const {
    if (row_count == 0) return T{};
    T sum = static_cast<const T*>(rows.at(0))[gather.dimension_count == 0 ? i : source(i)];
    for (int row = 1; row < row_count; ++row) sum += static_cast<const T*>(rows.at(row))[i];
    return sum;
  }

  [[nodiscard]] HSDP_HOST_DEVICE std::int64_t source(std::int64_t i) const {
    std::int64_t index = gather.begin + i;
    std::int64_t offset = 0;
    for (int d = gather.dimension_count - 1; d > 0; --d) {
      offset += index % gather.dimensions[d].extent * gather.dimensions[d].stride;
      index /= gather.dimensions[d].extent;
    }
    return offset + index * gather.dimensions[0].stride;
  }

  [[nodiscard]] HSDP_HOST_DEVICE T finished(std::int64_t i, T sum) const {
    if (add != nullptr) sum = add[i] + sum;
    if (base != nullptr) sum = base[i] + sum;
    if constexpr (std::is_floating_point_v<T>) {
      return finish_wide(sum, false, 0.0, divisor, multiplier);
    } else {
      return sum;
    }
  }
};

// values *= *factor, unless that is 1.
struct WideScaleByBody {
  static constexpr int kResident = 1;
  struct Shared {};

  double* values = nullptr;
  std::int64_t count = 0;
  const double* factor = nullptr;

  HSDP_HOST_DEVICE void operator()(const Block& block, Shared& /*shared*/) const {
    const double by = *factor;
    if (by == 1.0) return;
    block.each_thread([this, &block, by](int thread) {
      for (std::int64_t i = block.rank(thread); i < count; i += block.size()) values[i] *= by;
    });
  }
};

}  // namespace hsdp::kernels
