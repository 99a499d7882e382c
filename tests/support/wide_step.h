// A step with f64 gradients among others: f64 stays f64, whatever the wires are.
#pragma once

#include <optional>
#include <vector>

#include "hsdp/mesh.h"
#include "hsdp/reducer_options.h"

namespace hsdp::test {

// On every rank of the mesh: sums in f64 that f32 would round, beside exact ones in f32. Checks
// shards, partial shards, gathered gradients, the norm, and what clipping leaves. A microbatch
// without an explicit sync sums one group over the replicas and the other not, so that there are
// totals in the middle of the step.
void expect_wide_step(const Mesh& mesh, const ReducerOptions& options,
                      const std::vector<std::optional<Sync>>& schedule);

}  // namespace hsdp::test
