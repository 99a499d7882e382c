// A step that some ranks break: what every rank sees, and that the next step is right.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tests/support/reducer_step.h"

namespace hsdp::test {

struct FaultyStep {
  StepCase step;
  int microbatch = 0;  // that goes wrong
  std::set<int> bad_ranks;
  // The bad rank's whole microbatch; must throw.
  std::function<void(Reducer& reducer, int rank)> fault;
};

// What each rank's broken step threw: its text, and the ranks it names (empty for other errors).
struct FaultReport {
  std::string text;
  std::vector<int> ranks;
  bool step_aborted = false;  // a StepAbortedError
  bool usage = false;         // a UsageError
};

// Runs the broken step, then a clean one through the same Reducer, `repeat_count` times. Checks
// the clean steps against the reference, and that after a broken one there is no result.
[[nodiscard]] std::vector<FaultReport> run_faulty_step(MeshShape shape,
                                                       const ReducerOptions& options,
                                                       const FaultyStep& faulty,
                                                       int repeat_count = 1);

// The good ranks got StepAbortedError that names the bad ranks, and `text`.
void expect_aborted(const std::vector<FaultReport>& reports, const FaultyStep& faulty,
                    const std::string& text = "");

}  // namespace hsdp::test
