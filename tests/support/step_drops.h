// A step that some ranks drop, at every moment and whatever the others do meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <stdexcept>
#include <vector>

#include "hsdp/reducer.h"

namespace hsdp::test {

// What a rank that drops a step throws, and keeps.
struct OwnError : std::runtime_error {
  OwnError() : runtime_error("of this rank's own") {}
};

// What one rank does with the Reducer under test, wherever its gradients lie.
struct DropActions {
  // A whole microbatch; it has the gradients of microbatch m of the test's step.
  std::function<void(int m, Sync sync)> microbatch;
  // Opens one, hands some gradients over, and throws OwnError.
  std::function<void(int m, Sync sync)> broken_microbatch;
  // A whole step that nobody drops, and its result.
  std::function<std::vector<std::vector<float>>()> clean_step;
};

struct DropCase {
  enum class Peers : std::uint8_t { kContinue, kFinish, kDiscard };
  std::vector<Sync> before;    // microbatches of all ranks
  std::optional<Sync> inside;  // dropped within it; else between microbatches
  Peers peers = Peers::kContinue;
  std::uint32_t ranks = 0;  // those that drop, a bit each
};
void PrintTo(const DropCase& drop, std::ostream* out);

// Every moment, every set of ranks of a mesh of that size, everything that the others may do.
[[nodiscard]] std::vector<DropCase> every_drop(int size);

// Runs the case on this rank, then a clean step, whose result is `expected`: who drops keeps its
// own error, the others get one StepAbortedError that names a rank which did, or none in a discard,
// and all of them have counted the same steps.
void run_drop(Reducer& reducer, const DropActions& actions, const DropCase& drop, int rank,
              const std::vector<std::vector<float>>& expected);

}  // namespace hsdp::test
