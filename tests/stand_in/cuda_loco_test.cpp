// LocoHop on a GPU, on the stand-in for the CUDA runtime: the bits of the host.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "device_rank.h"
#include "quant/loco_hop.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using quant::LocoHop;
using quant::LocoOptions;
using stand_in::Bytes;

constexpr std::size_t kSteps = 5;
constexpr std::size_t kOverflows = 2;  // this one

// Everything that a rank ends up with: its shards after every step, and the errors.
struct Outcome {
  std::vector<test::RankResult> steps = std::vector<test::RankResult>(kSteps);
  std::vector<std::string> names;
  std::vector<Bytes> state;
};

std::vector<test::StepCase> some_steps(test::MeshShape shape) {
  std::vector<test::StepCase> steps;
  for (std::uint64_t s = 0; s < kSteps; ++s) {
    steps.push_back(test::random_step(stand_in::parameters(Dtype::kBf16), shape.size(),
                                      {Sync::kShard, Sync::kAll}, s + 1));
  }
  (*steps[kOverflows].gradients[2][1].back())[17] = std::numeric_limits<float>::infinity();
  return steps;
}

void read_state(LocoHop& hop, Outcome& outcome) {
  for (const HopState& one : hop.state()) {
    outcome.names.push_back(one.key);
    const auto* const begin = static_cast<const std::byte*>(one.data.data);
    outcome.state.emplace_back(begin, begin + one.data.size_in_bytes());
  }
}

std::vector<Outcome> on_host(test::MeshShape shape, const LocoOptions& options) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(shape.size()));
  const std::vector<test::StepCase> steps = some_steps(shape);
  test::run_mesh(shape, [&](const Mesh& mesh) {
    Outcome& outcome = outcomes[static_cast<std::size_t>(mesh.rank())];
    const auto hop = std::make_shared<LocoHop>(options);
    Reducer reducer(mesh, {.bucket_bytes = 8192, .replica_hop = hop});
    test::register_all(reducer, steps[0]);
    for (std::size_t s = 0; s < kSteps; ++s) {
      outcome.steps[s] = test::run_step(reducer, steps[s], mesh.rank());
    }
    read_state(*hop, outcome);
  });
  return outcomes;
}

std::vector<Outcome> on_gpu(test::MeshShape shape, const LocoOptions& options) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(shape.size()));
  const std::vector<test::StepCase> steps = some_steps(shape);
  stand_in::run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Outcome& outcome = outcomes[static_cast<std::size_t>(mesh.rank())];
    const auto hop = std::make_shared<LocoHop>(options);
    Reducer reducer(mesh, {.bucket_bytes = 8192, .replica_hop = hop});
    test::register_all(reducer, steps[0]);
    for (std::size_t s = 0; s < kSteps; ++s) {
      stand_in::Rank rank(reducer, steps[s], mesh.rank());
      rank.run_steps();
      rank.read(outcome.steps[s]);
      EXPECT_EQ(reducer.found_inf(), s == kOverflows);
    }
    read_state(*hop, outcome);
  });
  return outcomes;
}

class CudaLoco : public ::testing::TestWithParam<LocoOptions> {};

TEST_P(CudaLoco, HasTheBitsOfTheHost) {
  for (const test::MeshShape shape : {test::MeshShape{2, 2}, test::MeshShape{3, 1}}) {
    const std::vector<Outcome> host = on_host(shape, GetParam());
    const std::vector<Outcome> gpu = on_gpu(shape, GetParam());
    for (std::size_t r = 0; r < host.size(); ++r) {
      const std::string rank = "rank " + std::to_string(r);
      for (std::size_t s = 0; s < kSteps; ++s) {
        for (std::size_t p = 0; p < host[r].steps[s].shards.size(); ++p) {
          test::expect_same_bits(gpu[r].steps[s].shards[p], host[r].steps[s].shards[p],
                                 rank + ", step " + std::to_string(s));
        }
      }
      EXPECT_EQ(gpu[r].names, host[r].names);
      EXPECT_TRUE(gpu[r].state == host[r].state) << rank;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Options, CudaLoco,
    ::testing::Values(LocoOptions{}, LocoOptions{.reset_T = 2},
                      LocoOptions{
                          .bits = 8, .error_dtype = Dtype::kF32, .gather = quant::Code::kBf16},
                      LocoOptions{.exclude = {"matrix"}, .stochastic_error = true},
                      LocoOptions{.error_feedback = false}));

}  // namespace
}  // namespace hsdp
