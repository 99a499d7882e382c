#include "hsdp/snapshot/verdict.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "hsdp/divide_factors.h"

namespace hsdp {
namespace {

// -log2 of the unit roundoff that verdicts assume.
int precision(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return 8;
    case Dtype::kF16:
      return 11;
    case Dtype::kF64:
      return 53;
    default:
      return 24;
  }
}

double ratio(long double part, long double whole) {
  if (part == 0) return 0;
  if (whole == 0) return std::numeric_limits<double>::infinity();
  return static_cast<double>(part / whole);
}

double cosine(const Difference& difference) {
  const long double norms = std::sqrt(difference.squared_a) * std::sqrt(difference.squared_b);
  if (norms == 0) return difference.squared_a == difference.squared_b ? 1 : 0;
  return static_cast<double>(std::clamp(difference.product / norms, -1.0L, 1.0L));
}

std::vector<HeatCell> heat_cells(const Difference& difference, std::int64_t parameter_count) {
  std::vector<HeatCell> heat;
  const auto cell_count = static_cast<std::int64_t>(difference.cells.size());
  for (std::int64_t cell = 0; cell < cell_count; ++cell) {
    const CellSums& sums = difference.cells[static_cast<std::size_t>(cell)];
    const std::int64_t elements = cell_begin(cell + 1, cell_count, parameter_count) -
                                  cell_begin(cell, cell_count, parameter_count);
    heat.push_back({sums.max, static_cast<double>(
                                  std::sqrt(sums.squared / static_cast<long double>(elements)))});
  }
  return heat;
}

ErrorHistogram trim(const Difference& difference) {
  ErrorHistogram histogram;
  histogram.zero_count = difference.zero_count;
  const auto& bins = difference.histogram;
  const auto counted = [](std::int64_t count) { return count != 0; };
  const auto first = std::find_if(bins.begin(), bins.end(), counted);
  if (first == bins.end()) return histogram;
  const auto last = std::find_if(bins.rbegin(), bins.rend(), counted).base();
  histogram.first_exponent = kLowestExponent + static_cast<int>(first - bins.begin());
  histogram.counts.assign(first, last);
  return histogram;
}

double badness(const ParameterDifference& result) {
  return std::max(result.relative_l2, result.max_relative);
}

}  // namespace

double default_limit(Dtype coarsest) {
  switch (coarsest) {
    case Dtype::kBf16:
      return 0x1p-6;
    case Dtype::kF16:
      return 0x1p-9;
    default:
      return 0x1p-20;
  }
}

bool replica_hop_ran(const SnapshotInfo& info) { return info.replicate_size > 1 && !info.partial; }

Dtype coarser(Dtype a, Dtype b) { return precision(b) < precision(a) ? b : a; }

Dtype coarsest_wire(const SnapshotInfo& info, const SnapshotParameter& parameter) {
  // Whole arrays come from elsewhere; their reduce_dtype states what they went through.
  const bool shard_hop_ran = info.shard_size > 1 || info.layout == "full";
  const Dtype sent = parameter.reduce_dtype;
  const Dtype wire = shard_hop_ran ? sent : sum_dtype(sent);
  if (!replica_hop_ran(info)) return wire;
  return coarser(wire, replica_wire(sent, info.replica_dtype));
}

bool is_quantized(const SnapshotInfo& info) { return info.quantizes && replica_hop_ran(info); }

void judge(const Difference& difference, Criterion criterion, bool judged,
           ParameterDifference& result) {
  result.max_absolute = difference.max_difference;
  result.max_relative = ratio(difference.max_difference, difference.max_b);
  result.relative_l2 =
      ratio(std::sqrt(difference.squared_difference), std::sqrt(difference.squared_b));
  result.max_ulp = difference.max_ulp;
  result.cosine = cosine(difference);
  result.max_b = difference.max_b;
  result.nonfinite_a = difference.nonfinite_a;
  result.nonfinite_b = difference.nonfinite_b;
  result.nonfinite_mismatches = difference.nonfinite_mismatches;
  result.failing = difference.failing;
  result.worst = difference.worst.pair;
  result.heat = heat_cells(difference, result.count);
  result.histogram = trim(difference);
  bool same = result.nonfinite_mismatches == 0;
  if (criterion == Criterion::kRelative) {
    same = same &&
           (!judged || (result.relative_l2 <= result.limit && result.max_relative <= result.limit));
  } else {
    same = same && result.failing == 0;
  }
  result.verdict = !same ? Verdict::kDifferent : judged ? Verdict::kSame : Verdict::kNotJudged;
}

bool is_worse(const ParameterDifference& x, const ParameterDifference& y) {
  const bool x_differs = x.verdict == Verdict::kDifferent;
  const bool y_differs = y.verdict == Verdict::kDifferent;
  if (x_differs != y_differs) return x_differs;
  if (x.nonfinite_mismatches != y.nonfinite_mismatches) {
    return x.nonfinite_mismatches > y.nonfinite_mismatches;
  }
  // In units of their limits, so that bf16 and f32 parameters can be ranked together.
  const double bad_x = badness(x) / x.limit;
  const double bad_y = badness(y) / y.limit;
  if (bad_x != bad_y) return bad_x > bad_y;
  return x.max_ulp > y.max_ulp;
}

}  // namespace hsdp
