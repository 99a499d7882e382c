// A step that some ranks drop, at every moment and whatever the other ranks do meanwhile.
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <stdexcept>
#include <vector>

#include "hsdp/reducer.h"

namespace hsdp::test {

// What a rank throws to drop a step; that rank keeps this error.
struct OwnError : std::runtime_error {
  OwnError() : runtime_error("of this rank's own") {}
};

// What one rank does with the Reducer under test, wherever its gradients lie.
struct DropActions {
  // Runs a whole microbatch with the gradients of microbatch m of the test's step.
  std::function<void(int m, Sync sync)> microbatch;
  // Opens a microbatch, hands over some gradients, and throws OwnError.
  std::function<void(int m, Sync sync)> broken_microbatch;
  // Runs a whole step that no rank drops; returns its result.
  std::function<std::vector<std::vector<float>>()> clean_step;
};

struct DropCase {
  enum class Peers : std::uint8_t { kContinue, kFinish, kDiscard };
  std::vector<Sync> before;    // microbatches of all ranks
  std::optional<Sync> inside;  // of the microbatch that is dropped; none: between microbatches
  Peers peers = Peers::kContinue;
  std::uint32_t ranks = 0;  // those that drop, one bit each
};
void PrintTo(const DropCase& drop, std::ostream* out);

// Every moment, every set of ranks of a mesh of that size, and everything that the others may do.
[[nodiscard]] std::vector<DropCase> every_drop(int size);

// Runs the case on this rank, then a clean step, whose result is `expected`. A rank that drops
// keeps its own error. The others get one StepAbortedError that names such a rank, or none in a
// discard. All of them have counted the same steps.
void run_drop(Reducer& reducer, const DropActions& actions, const DropCase& drop, int rank,
              const std::vector<std::vector<float>>& expected);

}  // namespace hsdp::test
