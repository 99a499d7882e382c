// Compares the gradients of two snapshots, which may differ in mesh shape, layout and dtypes.
//
// Both are streamed: memory stays bounded whatever their size. Every byte read is checked, and the
// replicas of each must be bitwise equal (except partials). The result depends only on the two
// snapshots and the options, not on threads or timing.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/snapshot.h"

namespace hsdp {

// What "same" means. kRelative: relative L2 and max|a-b| / max|b| within default_limit();
// kTolerance: |a-b| <= atol + rtol |b| for every element; kUlp: at most `max_ulp` ULPs of the
// coarser dtype; kBitwise: equal bits.
enum class Criterion : std::uint8_t { kRelative, kTolerance, kUlp, kBitwise };

// kNotJudged: LoCo ran and no tolerance was given.
enum class Verdict : std::uint8_t { kSame, kDifferent, kNotJudged };

struct CompareOptions {
  std::optional<double> rtol{};  // either selects kTolerance; the other is then 0
  std::optional<double> atol{};
  std::optional<double> ulp{};
  bool bitwise = false;
  bool detail = false;                              // also error histograms and heat strips
  int thread_count = 0;                             // 0: as many as the machine has, up to 8
  std::function<void(double fraction)> progress{};  // may be called from any thread, one at a time
};

struct ElementPair {
  std::int64_t index = -1;  // in the flattened parameter; -1: none
  int replica = 0;
  double a = 0;
  double b = 0;
};

// Errors |a-b| along one stretch of the flattened parameter.
struct HeatCell {
  double max = 0;
  double root_mean_square = 0;
};

// counts[i] elements have 2^(first_exponent + i) <= |a-b| < 2^(first_exponent + i + 1).
struct ErrorHistogram {
  int first_exponent = 0;
  std::vector<std::int64_t> counts;
  std::int64_t zero_count = 0;
};

// The measures leave out pairs with a NaN or an infinity, which are counted separately.
struct ParameterDifference {
  std::string name;
  Shape shape;
  std::int64_t count = 0;
  Dtype coarsest = Dtype::kF32;  // among the wires and the stored data of both
  double limit = 0;              // for kRelative
  double max_absolute = 0;       // max|a-b|
  double max_relative = 0;       // max|a-b| / max|b|
  double relative_l2 = 0;        // |a-b| / |b|
  double max_ulp = 0;            // of `coarsest`, at the larger magnitude of each pair
  double cosine = 1;
  double max_b = 0;
  std::int64_t nonfinite_a = 0;
  std::int64_t nonfinite_b = 0;
  std::int64_t nonfinite_mismatches = 0;  // pairs of different kinds always differ
  std::int64_t failing = 0;               // elements out of tolerance; 0 for kRelative
  ElementPair worst;
  Verdict verdict = Verdict::kSame;
  std::vector<HeatCell> heat;  // with detail
  ErrorHistogram histogram;
};

struct Comparison {
  std::filesystem::path path_a;
  std::filesystem::path path_b;
  SnapshotInfo a;
  SnapshotInfo b;
  Criterion criterion = Criterion::kRelative;
  double rtol = 0;
  double atol = 0;
  double ulp = 0;
  Verdict verdict = Verdict::kSame;
  std::vector<ParameterDifference> parameters;  // worst first
};

// The limit of kRelative by the coarsest dtype: 2^-6 bf16, 2^-9 f16, else 2^-20.
[[nodiscard]] double default_limit(Dtype coarsest);

// Throws UsageError for contradictory options, and SnapshotError if the two cannot be compared:
// damaged files, different sets of parameters, unequal replicas, a partial against a result.
[[nodiscard]] Comparison compare_snapshots(const Snapshot& a, const Snapshot& b,
                                           const CompareOptions& options = {});

}  // namespace hsdp
