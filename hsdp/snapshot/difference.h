// The differences of one parameter, collected run by run and merged in order.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "hsdp/compare.h"
#include "hsdp/snapshot/block_difference.h"

namespace hsdp {

constexpr std::int64_t kHeatCells = 96;
// Exponents of |a-b| from -192 to 191; the outer bins hold everything beyond.
constexpr int kHistogramBins = 384;
constexpr int kLowestExponent = -192;

struct ElementRule {
  Criterion criterion = Criterion::kRelative;
  double rtol = 0;
  double atol = 0;
  double ulp = 0;
  UlpSpacing spacing;
};

struct WorstElement {
  ElementPair pair;
  double difference = -1;  // below every difference
  bool fails = false;
};

struct CellSums {
  double max = 0;
  long double squared = 0;
};

// The sums are long double, so that they hold the squares of any fp64 value.
struct Difference {
  double max_difference = 0;
  double max_a = 0;
  double max_b = 0;
  double max_ulp = 0;
  long double squared_difference = 0;
  long double squared_a = 0;
  long double squared_b = 0;
  long double product = 0;
  std::int64_t nonfinite_a = 0;
  std::int64_t nonfinite_b = 0;
  std::int64_t nonfinite_mismatches = 0;
  std::int64_t failing = 0;
  WorstElement worst;
  std::vector<CellSums> cells;          // with detail
  std::vector<std::int64_t> histogram;  // kHistogramBins, with detail
  std::int64_t zero_count = 0;

  void merge(const Difference& later);
};

class DifferenceMeter {
 public:
  DifferenceMeter(const ElementRule& rule, std::int64_t parameter_count, bool detail);

  // Elements [index, index + a.size()) of both; T is float or double.
  template <class T>
  void add(std::int64_t index, int replica, std::span<const T> a, std::span<const T> b);
  [[nodiscard]] const Difference& result() const { return total_; }

 private:
  // Measures one run; its worst element may replace the worst so far.
  template <class T>
  [[nodiscard]] Difference measure(std::int64_t index, int replica, std::span<const T> a,
                                   std::span<const T> b) const;
  template <class T>
  void find_worst(std::int64_t index, int replica, std::span<const T> a, std::span<const T> b,
                  Difference& part) const;
  template <class T>
  [[nodiscard]] bool may_fail(const BlockDifference& block, std::span<const T> a,
                              std::span<const T> b) const;
  template <class T>
  [[nodiscard]] bool fails(T a, T b) const;
  template <class T>
  void add_histogram(std::span<const T> a, std::span<const T> b);

  ElementRule rule_;
  std::int64_t parameter_count_;
  bool detail_;
  Difference total_;
};

// The first element of heat cell `cell`, when `parameter_count` elements make `cell_count` cells.
[[nodiscard]] std::int64_t cell_begin(std::int64_t cell, std::int64_t cell_count,
                                      std::int64_t parameter_count);
[[nodiscard]] UlpSpacing ulp_spacing(Dtype dtype);

}  // namespace hsdp
