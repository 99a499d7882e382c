// A step with gradients of f64 among others: f64 stays f64, whatever the wires are.
#pragma once

#include <optional>
#include <vector>

#include "hsdp/mesh.h"
#include "hsdp/reducer_options.h"

namespace hsdp::test {

// On every rank of the mesh: sums in f64 that f32 would round, beside exact ones of f32. Looks at
// shards, partial shards, gathered gradients, the norm and what clipping leaves. A microbatch
// without a sync sums one group over the replicas and the other not, so that totals stand amid the
// step.
void expect_wide_step(const Mesh& mesh, const ReducerOptions& options,
                      const std::vector<std::optional<Sync>>& schedule);

}  // namespace hsdp::test
