#include "hsdp/reducer/row_check.h"

#include <utility>

#include "hsdp/kernels/digest.h"

namespace hsdp::reducer {

void RowCheck::begin(std::int64_t step, std::vector<Run> runs) {
  step_ = step;
  runs_ = std::move(runs);
  if (digests_.count() != runs_.size()) digests_ = Digests(groups_.device, runs_.size());
  digests_.clear();
}

// A group may have several totals in a step; their digests add up.
void RowCheck::add(int group, TensorView total, const Stream& stream) {
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    const ParameterRange& range = runs_[i].range;
    if (runs_[i].group != group) continue;
    kernels::add_digest(total.slice(range.offset, range.count), 0, digests_.at(i), stream);
  }
}

std::vector<std::int64_t> RowCheck::claim(std::int64_t step) const {
  if (!has_begun(step)) return {};
  return row_claims(groups_, digests_.together(0, digests_.count()));
}

void RowCheck::require_equal(std::int64_t step, std::span<const std::int64_t> most,
                             StepAgreement& agreement) {
  require_equal_rows(step, most, groups_, agreement,
                     {.owner = "replica_hook",
                      .digests = [this] { return digests_.texts(); },
                      .name = [this](std::size_t place) { return runs_[place].name; }});
}

}  // namespace hsdp::reducer
