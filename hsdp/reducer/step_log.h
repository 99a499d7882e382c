// What rank 0 logs about a Reducer: its buckets and memory when they are set up, and each step.
#pragma once

#include "hsdp/memory_count.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/microbatch_plan.h"
#include "hsdp/reducer/parameter_table.h"

namespace hsdp::reducer {

// Logs at level info.
void log_layout(const ReducerOptions& options, const Groups& groups,
                const ParameterTable& parameters, const BucketLayout& layout,
                const MemoryCount& memory);
// Logs at level debug, if `plan` ends the step.
void log_step(const ReducerOptions& options, const Groups& groups, const MicrobatchPlan& plan);

}  // namespace hsdp::reducer
