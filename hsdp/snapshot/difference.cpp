#include "hsdp/snapshot/difference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace hsdp {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool is_ordinary(const BlockDifference& block) {
  return std::isfinite(block.sum_squared_a) && std::isfinite(block.sum_squared_b) &&
         std::isfinite(block.sum_squared_difference);
}

// Whether both are NaN, or infinities of one sign.
template <class T>
bool same_kind(T a, T b) {
  return (std::isnan(a) && std::isnan(b)) || a == b;
}

template <class T>
bool both_finite(T a, T b) {
  return std::isfinite(a) && std::isfinite(b);
}

// Saturates instead of overflowing: finite pairs have a finite difference.
template <class T>
double distance(T a, T b) {
  const double d = std::abs(static_cast<double>(a) - static_cast<double>(b));
  return std::min(d, std::numeric_limits<double>::max());
}

template <class T>
double ulps(T a, T b, UlpSpacing spacing) {
  const double larger =
      std::max(std::abs(static_cast<double>(a)), std::abs(static_cast<double>(b)));
  const int exponent = larger == 0 ? spacing.min_exponent : std::ilogb(larger);
  return std::ldexp(distance(a, b),
                    spacing.mantissa_bits - std::max(exponent, spacing.min_exponent));
}

// Handles what block_difference() cannot: NaN, infinities, squares beyond fp64.
template <class T>
void add_exceptional(T a, T b, UlpSpacing spacing, Difference& part) {
  if (!both_finite(a, b)) {
    part.nonfinite_a += std::isfinite(a) ? 0 : 1;
    part.nonfinite_b += std::isfinite(b) ? 0 : 1;
    part.nonfinite_mismatches += same_kind(a, b) ? 0 : 1;
    return;
  }
  const auto x = static_cast<long double>(a);
  const auto y = static_cast<long double>(b);
  part.max_difference = std::max(part.max_difference, distance(a, b));
  part.max_a = std::max(part.max_a, std::abs(static_cast<double>(a)));
  part.max_b = std::max(part.max_b, std::abs(static_cast<double>(b)));
  part.max_ulp = std::max(part.max_ulp, ulps(a, b, spacing));
  part.squared_difference += (x - y) * (x - y);
  part.squared_a += x * x;
  part.squared_b += y * y;
  part.product += x * y;
}

bool is_worse(const WorstElement& x, const WorstElement& y) {
  return x.fails != y.fails ? x.fails : x.difference > y.difference;
}

}  // namespace

UlpSpacing ulp_spacing(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return {7, -126};
    case Dtype::kF16:
      return {10, -14};
    case Dtype::kF64:
      return {52, -1022};
    default:
      return {23, -126};
  }
}

std::int64_t cell_begin(std::int64_t cell, std::int64_t cell_count, std::int64_t parameter_count) {
  return parameter_count / cell_count * cell + std::min(cell, parameter_count % cell_count);
}

void Difference::merge(const Difference& later) {
  max_difference = std::max(max_difference, later.max_difference);
  max_a = std::max(max_a, later.max_a);
  max_b = std::max(max_b, later.max_b);
  max_ulp = std::max(max_ulp, later.max_ulp);
  squared_difference += later.squared_difference;
  squared_a += later.squared_a;
  squared_b += later.squared_b;
  product += later.product;
  nonfinite_a += later.nonfinite_a;
  nonfinite_b += later.nonfinite_b;
  nonfinite_mismatches += later.nonfinite_mismatches;
  failing += later.failing;
  if (is_worse(later.worst, worst)) worst = later.worst;
  cells.resize(std::max(cells.size(), later.cells.size()));
  for (std::size_t i = 0; i < later.cells.size(); ++i) {
    cells[i].max = std::max(cells[i].max, later.cells[i].max);
    cells[i].squared += later.cells[i].squared;
  }
  histogram.resize(std::max(histogram.size(), later.histogram.size()));
  for (std::size_t i = 0; i < later.histogram.size(); ++i) histogram[i] += later.histogram[i];
  zero_count += later.zero_count;
}

DifferenceMeter::DifferenceMeter(const ElementRule& rule, std::int64_t parameter_count, bool detail)
    : rule_(rule), parameter_count_(parameter_count), detail_(detail && parameter_count > 0) {
  if (!detail_) return;
  total_.cells.resize(static_cast<std::size_t>(std::min(kHeatCells, parameter_count)));
  total_.histogram.resize(kHistogramBins);
}

template <class T>
void DifferenceMeter::add(std::int64_t index, int replica, std::span<const T> a,
                          std::span<const T> b) {
  if (!detail_) return total_.merge(measure(index, replica, a, b));
  add_histogram(a, b);
  const auto cell_count = static_cast<std::int64_t>(total_.cells.size());
  std::int64_t cell = std::min(cell_count - 1, index / (parameter_count_ / cell_count));
  while (cell_begin(cell, cell_count, parameter_count_) > index) --cell;
  for (; !a.empty(); ++cell) {
    const std::int64_t end = cell_begin(cell + 1, cell_count, parameter_count_);
    const auto count = std::min(a.size(), static_cast<std::size_t>(end - index));
    const Difference part = measure(index, replica, a.first(count), b.first(count));
    CellSums& sums = total_.cells[static_cast<std::size_t>(cell)];
    sums.max = std::max(sums.max, part.max_difference);
    sums.squared += part.squared_difference;
    total_.merge(part);
    a = a.subspan(count);
    b = b.subspan(count);
    index += static_cast<std::int64_t>(count);
  }
}

template <class T>
Difference DifferenceMeter::measure(std::int64_t index, int replica, std::span<const T> a,
                                    std::span<const T> b) const {
  Difference part;
  part.worst = total_.worst;
  const BlockDifference block = block_difference(a.data(), b.data(), a.size(), rule_.spacing);
  if (is_ordinary(block)) {
    part.max_difference = block.max_difference;
    part.max_a = block.max_a;
    part.max_b = block.max_b;
    part.max_ulp = block.max_ulp;
    part.squared_difference = block.sum_squared_difference;
    part.squared_a = block.sum_squared_a;
    part.squared_b = block.sum_squared_b;
    part.product = block.sum_product;
    const bool worse = !part.worst.fails && block.max_difference > part.worst.difference;
    if (!worse && !may_fail(block, a, b)) return part;
  } else {
    for (std::size_t i = 0; i < a.size(); ++i) add_exceptional(a[i], b[i], rule_.spacing, part);
  }
  find_worst(index, replica, a, b, part);
  return part;
}

template <class T>
void DifferenceMeter::find_worst(std::int64_t index, int replica, std::span<const T> a,
                                 std::span<const T> b, Difference& part) const {
  for (std::size_t i = 0; i < a.size(); ++i) {
    WorstElement element;
    element.fails = fails(a[i], b[i]);
    if (element.fails && rule_.criterion != Criterion::kRelative) ++part.failing;
    if (both_finite(a[i], b[i])) {
      element.difference = distance(a[i], b[i]);
    } else {
      element.difference = same_kind(a[i], b[i]) ? 0 : kInfinity;
    }
    if (!is_worse(element, part.worst)) continue;
    element.pair = {index + static_cast<std::int64_t>(i), replica, static_cast<double>(a[i]),
                    static_cast<double>(b[i])};
    part.worst = element;
  }
}

// False only if no element can fail: this settles most runs without examining each element.
template <class T>
bool DifferenceMeter::may_fail(const BlockDifference& block, std::span<const T> a,
                               std::span<const T> b) const {
  switch (rule_.criterion) {
    case Criterion::kRelative:
      return false;
    case Criterion::kUlp:
      return block.max_ulp > rule_.ulp;
    case Criterion::kBitwise:
      return std::memcmp(a.data(), b.data(), a.size_bytes()) != 0;
    case Criterion::kTolerance:
      break;
  }
  if (block.max_difference <= rule_.atol) return false;
  std::int64_t failing = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a[i]);
    const double y = static_cast<double>(b[i]);
    failing += std::abs(x - y) > rule_.atol + rule_.rtol * std::abs(y) ? 1 : 0;
  }
  return failing != 0;
}

template <class T>
bool DifferenceMeter::fails(T a, T b) const {
  if (rule_.criterion == Criterion::kBitwise) {
    // The criterion is equal bits: 0 and -0 differ.
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
    return std::memcmp(&a, &b, sizeof a) != 0;
  }
  if (!both_finite(a, b)) return !same_kind(a, b);
  switch (rule_.criterion) {
    case Criterion::kTolerance: {
      const double x = static_cast<double>(a);
      const double y = static_cast<double>(b);
      return std::abs(x - y) > rule_.atol + rule_.rtol * std::abs(y);
    }
    case Criterion::kUlp:
      return ulps(a, b, rule_.spacing) > rule_.ulp;
    default:
      return false;
  }
}

template <class T>
void DifferenceMeter::add_histogram(std::span<const T> a, std::span<const T> b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!std::isfinite(d)) continue;
    if (d == 0) {
      ++total_.zero_count;
      continue;
    }
    const auto exponent = static_cast<int>(std::bit_cast<std::uint64_t>(d) >> 52U) - 1023;
    const int bin = std::clamp(exponent - kLowestExponent, 0, kHistogramBins - 1);
    ++total_.histogram[static_cast<std::size_t>(bin)];
  }
}

template void DifferenceMeter::add(std::int64_t, int, std::span<const float>,
                                   std::span<const float>);
template void DifferenceMeter::add(std::int64_t, int, std::span<const double>,
                                   std::span<const double>);

}  // namespace hsdp
