#include "hsdp/reducer/scratch_need.h"

#include <algorithm>
#include <vector>

#include "hsdp/device/scratch.h"
#include "hsdp/kernels/norm.h"
#include "hsdp/reducer/slice_gather.h"

namespace hsdp::reducer {
namespace {

// For norms, factors and flags under way, and small sums of the engine.
constexpr std::size_t kWords = 64;

}  // namespace

std::size_t scratch_need(const ParameterTable& parameters, const BucketLayout& layout,
                         int slice_rank, Device device) {
  const int count = layout.parameter_count();
  std::vector<kernels::SquaredNorm> norms;
  std::vector<FullArray> all;
  for (int p = 0; p < count; ++p) {
    const Dtype dtype = sum_dtype(parameters.wire_dtype(p));
    norms.push_back({{nullptr, layout.slice(p, slice_rank).count, dtype, device}});
    all.push_back({p, {nullptr, parameters.count(p), dtype, device}});
  }
  const std::size_t norm = kernels::squared_norms_scratch(norms);
  const std::size_t words =
      kWords * scratch_size(1) + scratch_size(sizeof(double) * static_cast<std::size_t>(count));
  if (layout.shard_size() == 1) return words + scratch_size(norm);
  return words + scratch_size(norm) +
         scratch_size(gather_scratch(layout, gather_units(layout, all, kGatherUnitBytes)));
}

}  // namespace hsdp::reducer
