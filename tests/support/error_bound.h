// The mean gradient in float64, and how far from it rule 4 of docs/design.md lets a result be.
#pragma once

#include <vector>

#include "tests/support/numeric_reference.h"

namespace hsdp::test {

struct BoundedMean {
  std::vector<double> value;
  std::vector<double> bound;  // of |result - value|, per element
};

// Schedules of one replica hop: every microbatch none or shard, but for the last.
[[nodiscard]] BoundedMean bounded_mean(const ReferenceStep& step, const Gradients& gradients);

// The element that exceeds its bound by the largest ratio: 1.0 or less is within.
[[nodiscard]] double worst_error_ratio(const BoundedMean& mean, const Values& result);

}  // namespace hsdp::test
