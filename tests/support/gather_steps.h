// The steps of an optimizer whose parameters are gathered under the next step. Host and GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "hsdp/reducer.h"
#include "tests/support/reducer_step.h"
#include "zero/parameter_gather.h"

namespace hsdp::test {

// What differs between host and GPU in the steps below.
struct GatherSteps {
  int count = 1;
  std::uint64_t seed = 1;
  std::int64_t unit_bytes = 2 << 10;
  // Runs one microbatch of the step and calls `inside` while it is open.
  std::function<void(int microbatch, const std::function<void()>& inside)> microbatch;
  std::function<std::vector<Values>()> shards;  // of the step's result
};

// Trains with an optimizer that halves a parameter and adds its gradient. Units are updated in a
// shuffled order and gathered under the next step. In and between microbatches, gathered parameters
// have the bits of gather_parameters(). Returns the parameters after the last step.
[[nodiscard]] std::vector<Values> run_gather_steps(Reducer& reducer, const StepCase& step,
                                                   const Mesh& mesh, const GatherSteps& steps);

// Both, for gradients in host memory.
[[nodiscard]] GatherSteps gather_steps_on_host(Reducer& reducer, const StepCase& step, int rank);

}  // namespace hsdp::test
