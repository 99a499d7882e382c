// Finds this rank's mistakes with gradients: one that does not fit its parameter, one too many, or
// a missing one. Local.
#pragma once

#include <string>

#include "hsdp/reducer/collector.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/microbatch_plan.h"
#include "hsdp/reducer/parameter_table.h"

namespace hsdp::reducer {

class GradientFaults {
 public:
  // All of these outlive it.
  GradientFaults(const ReducerOptions& options, const ParameterTable& parameters,
                 const Groups& groups)
      : options_(options), parameters_(parameters), groups_(groups) {}

  // UsageError for an unknown parameter, and for a gradient of another shape, dtype or device, with
  // wrong strides, without memory, or that cannot be packed.
  void require_fits(int parameter, const StridedView& gradient) const;
  // The message about one too many. `window`: the open one, or null.
  [[nodiscard]] std::string too_many(int parameter, const WindowOptions* window) const;
  // The message about gradients that are missing at the end of a microbatch, or that arrived
  // although this rank has no batch. Empty if neither.
  [[nodiscard]] std::string missing(const Collector& collector, const MicrobatchPlan& plan,
                                    bool in_window) const;

 private:
  [[nodiscard]] std::string unexpected(const Collector& collector) const;

  const ReducerOptions& options_;
  const ParameterTable& parameters_;
  const Groups& groups_;
};

}  // namespace hsdp::reducer
