// The numeric rules of docs/design.md as plain scalar code: the exact bits that a step must give,
// one parameter at a time. The calling thread simulates all ranks.
//
// Written from the rules alone: it shares no arithmetic with the library, not even the rounding.
#pragma once

#include <optional>
#include <vector>

#include "hsdp/dtype.h"
#include "hsdp/reducer.h"

namespace hsdp::test {

using Values = std::vector<float>;
// One parameter's gradients: [microbatch][rank], each exact in the gradient's dtype. An empty
// optional is a missing gradient.
using Gradients = std::vector<std::vector<std::optional<Values>>>;

struct ReferenceStep {
  int replicate = 1;
  int shard = 1;
  std::vector<Sync> schedule;  // of the parameter's group, one per microbatch
  bool finish = false;         // after the last microbatch
  Dtype gradient_dtype = Dtype::kF32;
  Dtype reduce_dtype = Dtype::kF32;
  Dtype replica_dtype = Dtype::kF32;
  AccumulateDtype accumulate_dtype = AccumulateDtype::kF32;
  ShardOver shard_over = ShardOver::kShard;  // kMesh: no total is rounded
  std::optional<double> divide_factor;
  double loss_scale = 1.0;
};

// The flattened mean gradient, the same on every replica.
[[nodiscard]] Values reference_result(const ReferenceStep& step, const Gradients& gradients);

// What partial_shard reads on one replica when the schedule ends with a pending carry.
[[nodiscard]] Values reference_partial(const ReferenceStep& step, const Gradients& gradients,
                                       int replica);

// A wrong order, as a counterexample: each replica adds its carry after the replica hop of the last
// microbatch.
[[nodiscard]] Values accumulate_after_all_reduce(const ReferenceStep& step,
                                                 const Gradients& gradients, int replica);

// Rounds to nearest even on the dtype's grid; to infinity beyond its largest value.
[[nodiscard]] float round_to(Dtype dtype, float value);

// ceil(log2(n)).
[[nodiscard]] int power_of_two_above(int n);

}  // namespace hsdp::test
