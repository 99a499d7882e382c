// Runs a test's steps through a Reducer on every rank and compares them with the reference.
#pragma once

#include <gmock/gmock.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/mesh.h"
#include "hsdp/reducer.h"
#include "tests/support/gradient_values.h"
#include "tests/support/numeric_reference.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::test {

// One step of all ranks: everything that decides its bits.
struct StepCase {
  std::vector<ParameterSpec> parameters;
  std::vector<Gradients> gradients;  // per parameter
  std::vector<Sync> schedule;        // explicit sync of each microbatch
  bool finish = false;
  std::optional<double> divide_factor;
  double loss_scale = 1.0;
};

// How a rank hands over its gradients, which must not change any bit.
enum class Order : std::uint8_t { kForward, kReverse, kRandom };  // random: differs by rank
struct Delivery {
  Order order = Order::kForward;
  int thread_count = 1;
  bool transposed = false;  // gradients lie in memory with reversed axes
  std::uint64_t seed = 0;
};

// What one rank reads after a step, per parameter.
struct RankResult {
  std::vector<Slice> slices;
  std::vector<Values> shards;
};

// Gradients for every microbatch and rank of `world_size`.
[[nodiscard]] StepCase integer_step(std::vector<ParameterSpec> parameters, int world_size,
                                    int microbatch_count, std::uint64_t seed);
[[nodiscard]] StepCase random_step(std::vector<ParameterSpec> parameters, int world_size,
                                   std::vector<Sync> schedule, std::uint64_t seed);
// Odd shapes, with an empty one and a scalar among them.
[[nodiscard]] std::vector<ParameterSpec> odd_parameters(Dtype dtype);

void register_all(Reducer& reducer, const StepCase& step);
[[nodiscard]] StoredGradient gradient_of(const StepCase& step, std::size_t parameter,
                                         int microbatch, int rank);
// The open microbatch's gradients of this rank, from `delivery.thread_count` threads. The memory
// must live until end_microbatch.
[[nodiscard]] std::vector<StoredGradient> deliver(Reducer& reducer, const StepCase& step,
                                                  int microbatch, int rank,
                                                  const Delivery& delivery = {});
void run_microbatch(Reducer& reducer, const StepCase& step, int microbatch, int rank,
                    const MicrobatchOptions& options, const Delivery& delivery = {});
// A step that rank 1 drops, as it lacks gradients. Every rank has been told when it returns.
void drop_step(Reducer& reducer, const StepCase& step, int rank);
// The microbatches with their explicit schedule, and finish() if the step ends with it.
void run_schedule(Reducer& reducer, const StepCase& step, int rank, const Delivery& delivery = {});
// The whole step with its factors; reads the result.
RankResult run_step(Reducer& reducer, const StepCase& step, int rank,
                    const Delivery& delivery = {});
[[nodiscard]] RankResult read_result(Reducer& reducer, const StepCase& step);
[[nodiscard]] Values values_of(const TensorView& view);

// One replica's shards of a parameter, joined in rank order. If results are sharded over the mesh:
// those of all ranks, with those of a shard rank side by side. A test failure when they do not tile
// the parameter.
[[nodiscard]] Values joined(std::span<const RankResult> ranks, int shard_size, int replica,
                            std::size_t parameter, std::int64_t count,
                            ShardOver shard_over = ShardOver::kShard);

[[nodiscard]] ReferenceStep reference_step(const StepCase& step, const ReducerOptions& options,
                                           MeshShape shape, std::size_t parameter);
// Of every parameter.
[[nodiscard]] std::vector<Values> reference_results(const StepCase& step,
                                                    const ReducerOptions& options, MeshShape shape);
// Every parameter on every replica has the reference's bits.
void expect_reference(std::span<const RankResult> ranks, const StepCase& step,
                      const ReducerOptions& options, MeshShape shape, const std::string& label);
// The bits are equal; all NaNs count as equal.
void expect_same_bits(const Values& got, const Values& want, const std::string& label);
void expect_same_bits(const std::vector<Values>& got, const std::vector<Values>& want,
                      const std::string& label);

// What a rank does with its Reducer, in which the parameters of a step are registered.
using ReducerBody = std::function<void(Reducer& reducer, const Mesh& mesh)>;
// On every rank of a new mesh.
void run_reducers(MeshShape shape, const StepCase& step, const ReducerOptions& options,
                  const ReducerBody& body, const ThreadRanksOptions& ranks = {});
// As above; checks that the result which `body` leaves on every rank has the reference's bits.
void expect_result(MeshShape shape, const StepCase& step, const ReducerOptions& options,
                   const ReducerBody& body, const ThreadRanksOptions& ranks = {});

// Match what caught() returns: an error with that message, and one that names those ranks.
inline auto says(const testing::Matcher<std::string>& message) {
  return testing::Optional(testing::Property("what", &std::exception::what, message));
}
inline auto names(const std::vector<int>& ranks,
                  const testing::Matcher<std::string>& message = testing::_) {
  return testing::Optional(
      testing::AllOf(testing::Property("ranks", &RankError::ranks, ranks),
                     testing::Property("what", &std::exception::what, message)));
}

// The whole gradients of the step that ended, gathered from all ranks, per parameter. Collective.
[[nodiscard]] std::vector<Values> gathered(Reducer& reducer, const StepCase& step);

}  // namespace hsdp::test
