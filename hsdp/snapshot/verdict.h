// Turns collected differences into measures and a verdict [Note: the default verdict].
#pragma once

#include "hsdp/compare.h"
#include "hsdp/snapshot/difference.h"

namespace hsdp {

// The coarser dtype: the one with the larger rounding error.
[[nodiscard]] Dtype coarser(Dtype a, Dtype b);

// The coarsest wire dtype that a parameter's gradients travelled in.
[[nodiscard]] Dtype coarsest_wire(const SnapshotInfo& info, const SnapshotParameter& parameter);
[[nodiscard]] bool is_quantized(const SnapshotInfo& info);

// Fills in measures and verdict; `judged` is false for LoCo without a tolerance.
void judge(const Difference& difference, Criterion criterion, bool judged,
           ParameterDifference& result);

// Whether `x` is worse than `y`, another parameter of the comparison.
[[nodiscard]] bool is_worse(const ParameterDifference& x, const ParameterDifference& y);

}  // namespace hsdp
