// The mean gradient in float64, and how far from it rule 4 of docs/design.md allows a result to be.
#pragma once

#include <vector>

#include "tests/support/numeric_reference.h"

namespace hsdp::test {

struct BoundedMean {
  std::vector<double> value;
  std::vector<double> bound;  // of |result - value|, per element
};

// For schedules with one replica hop: every microbatch but the last is none or shard.
[[nodiscard]] BoundedMean bounded_mean(const ReferenceStep& step, const Gradients& gradients);

// The largest ratio of an element's error to its bound: 1.0 or less is within.
[[nodiscard]] double worst_error_ratio(const BoundedMean& mean, const Values& result);

}  // namespace hsdp::test
