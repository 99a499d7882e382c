#include "hsdp/kernels/norm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "hsdp/error.h"
#include "hsdp/kernels/arithmetic.h"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/device_nonfinite.h"
#include "hsdp/kernels/float_environment.h"
#include "hsdp/kernels/norm_lanes.h"
#include "hsdp/kernels/row_pass.h"

namespace hsdp::kernels {

void NormTree::add(std::size_t level, double sum) {
  Level& at = levels_[level];
  at.lanes[static_cast<std::size_t>(at.count % kNormLaneCount)] += sum;
  if (++at.count == kNormChunkElements) close(level);
}

void NormTree::close(std::size_t level) {
  const double sum = lane_total(levels_[level].lanes.data());
  levels_[level] = {};
  add(level + 1, sum);
}

double NormTree::total() {
  std::size_t top = levels_.size() - 1;
  while (top > 0 && levels_[top].count == 0) --top;
  for (std::size_t level = 0; level < top; ++level) {
    if (levels_[level].count > 0) close(level);
  }
  if (top + 1 < levels_.size() && levels_[top + 1].count > 0) ++top;
  return lane_total(levels_[top].lanes.data());
}

void add_squares_range(ConstTensorView values, std::int64_t begin, std::int64_t end,
                       NormLanes& lanes) {
  for (std::int64_t i = begin; i < end; ++i) {
    const double value = decode_wide(values.data, i, values.dtype);
    lanes[static_cast<std::size_t>(i % kNormLaneCount)] += value * value;
  }
}

void sum_chunk_squares_scalar(ConstTensorView values, double* sums) {
  for (std::int64_t begin = 0; begin < values.count; begin += kNormChunkElements) {
    NormLanes lanes{};
    add_squares_range(values, begin, std::min(begin + kNormChunkElements, values.count), lanes);
    *sums++ = lane_total(lanes.data());
  }
}

bool has_nonfinite_range(ConstTensorView values, std::int64_t begin) {
  for (std::int64_t i = begin; i < values.count; ++i) {
    if (!std::isfinite(decode_wide(values.data, i, values.dtype))) return true;
  }
  return false;
}

namespace {

using SumChunks = void (*)(ConstTensorView, double*);

double sum_squares(ConstTensorView values, SumChunks sum_chunks) {
  constexpr std::int64_t kChunksAtOnce = 256;
  std::array<double, kChunksAtOnce> sums;
  NormTree tree;
  for (std::int64_t begin = 0; begin < values.count; begin += kChunksAtOnce * kNormChunkElements) {
    const std::int64_t count = std::min(kChunksAtOnce * kNormChunkElements, values.count - begin);
    sum_chunks(values.slice(begin, count), sums.data());
    std::for_each_n(sums.begin(), norm_chunks(count), [&tree](double sum) { tree.push(sum); });
  }
  return tree.total();
}

// Opaque to the compiler: see DefaultFloatEnvironment.
double (*volatile squares)(ConstTensorView, SumChunks) = sum_squares;

}  // namespace

double squared_norm(ConstTensorView values) {
  require_gradient_dtype(values.dtype, "squared_norm", "dtype");
  const DefaultFloatEnvironment environment;
  return squares(values, sum_chunk_squares);
}

double squared_norm_reference(ConstTensorView values) {
  require_gradient_dtype(values.dtype, "squared_norm", "dtype");
  const DefaultFloatEnvironment environment;
  return squares(values, sum_chunk_squares_scalar);
}

void squared_norms(std::span<const SquaredNorm> norms, const Stream& stream) {
  if (stream.device().type == DeviceType::kHost) {
    for (const SquaredNorm& norm : norms) *norm.sum = squared_norm(norm.values);
    return;
  }
  for (const SquaredNorm& norm : norms) {
    require_gradient_dtype(norm.values.dtype, "squared_norms", "dtype");
    if (norm.values.dtype == norms.front().values.dtype) continue;
    throw UsageError({.where = "squared_norms",
                      .expected = "values of one dtype",
                      .got = std::string(name(norms.front().values.dtype)) + " and " +
                             std::string(name(norm.values.dtype))});
  }
  squared_norms_on_device(norms, stream);
}

std::size_t squared_norms_scratch(std::span<const SquaredNorm> norms) {
  std::int64_t sums = 0;
  for (const SquaredNorm& norm : norms) {
    std::int64_t level = norm_chunks(norm.values.count);
    for (; level > 1; level = norm_chunks(level)) sums += level;
  }
  return static_cast<std::size_t>(sums) * sizeof(double);
}

bool has_nonfinite(ConstTensorView values) {
  require_gradient_dtype(values.dtype, "has_nonfinite", "dtype");
  return find_nonfinite(values);
}

bool has_nonfinite_reference(ConstTensorView values) {
  require_gradient_dtype(values.dtype, "has_nonfinite", "dtype");
  return has_nonfinite_range(values, 0);
}

void find_nonfinite(ConstTensorView values, std::atomic<std::uint32_t>* nonfinite,
                    const Stream& stream) {
  if (stream.device().type == DeviceType::kHost) {
    if (has_nonfinite(values)) nonfinite->store(1, std::memory_order_relaxed);
    return;
  }
  require_gradient_dtype(values.dtype, "has_nonfinite", "dtype");
  find_nonfinite_on_device(values, nonfinite, stream);
}

void indicate(const void* word, float* out, const Stream& stream) {
  if (stream.device().type == DeviceType::kHost) {
    *out = indicated(word);
    return;
  }
  indicate_on_device(word, out, stream);
}

void poison(const std::atomic<std::uint32_t>& word, TensorView out,
            std::atomic<std::uint32_t>* nonfinite, const Stream& stream) {
  poison_on_device(word, out, nonfinite, stream);
}

}  // namespace hsdp::kernels
