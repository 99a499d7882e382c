// An overlapped gather of parameters, with as little as it needs beside a Reducer's lane: every
// unit is started when its parameters are updated, readers wait for the unit they read, and the
// next update waits for all. And the steps of an optimizer that uses it. Host and GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "hsdp/reducer.h"
#include "hsdp/reducer/slice_gather.h"
#include "tests/support/reducer_step.h"

namespace hsdp::test {

class FakeGather {
 public:
  // Collective, after reducer.prepare(); the arrays, which outlive it, in registration order.
  FakeGather(Reducer& reducer, std::span<const reducer::FullArray> arrays, std::int64_t unit_bytes);

  [[nodiscard]] const std::vector<reducer::GatherUnit>& units() const { return units_; }
  // The same units in the same order on every rank. Never blocks.
  Event start(int unit, const Event& updated);
  // The new values are in, and no peer reads this rank's slice any more.
  [[nodiscard]] Event ready(int parameter) const;
  // Before `writer` updates: no gather is under way after it.
  void fence(const Stream& writer) const;

 private:
  const BucketLayout& layout_;
  std::vector<reducer::GatherUnit> units_;
  std::vector<Event> gathered_;  // by unit
  std::vector<int> unit_of_;     // by parameter, -1: in none
  std::unique_ptr<GatherLane> lane_;
};

// What differs between host and GPU in the steps below.
struct GatherSteps {
  int count = 1;
  std::uint64_t seed = 1;
  std::int64_t unit_bytes = 2 << 10;
  // One microbatch of the step, which calls `inside` while it is open.
  std::function<void(int microbatch, const std::function<void()>& inside)> microbatch;
  std::function<std::vector<Values>()> shards;  // of the step's result
};

// Trains with an optimizer that halves a parameter and adds its gradient: units are updated, and
// gathered under the next step, in a shuffled order. In and between microbatches, parameters that
// are ready have the bits of gather_parameters(). Returns the parameters after the last step.
[[nodiscard]] std::vector<Values> run_gather_steps(Reducer& reducer, const StepCase& step,
                                                   const Mesh& mesh, const GatherSteps& steps);

// Both for gradients in the host's memory.
[[nodiscard]] GatherSteps gather_steps_on_host(Reducer& reducer, const StepCase& step, int rank);

}  // namespace hsdp::test
