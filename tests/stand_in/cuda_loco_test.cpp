// LocoHop on a GPU, on the stand-in for the CUDA runtime: it gives the host's bits.
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gpu_rank.h"
#include "quant/loco_hop.h"

namespace hsdp::test {
namespace {

using quant::LocoHop;
using quant::LocoOptions;

constexpr std::size_t kSteps = 5;
constexpr std::size_t kOverflows = 2;  // this one

// Everything that a rank has at the end: its shards after every step, and the errors.
struct Outcome {
  std::vector<RankResult> steps;
  std::vector<std::string> names;
  std::vector<std::vector<std::byte>> state;
};

using RunMesh = std::function<void(MeshShape shape, const MeshBody& body)>;

struct LocoCase {
  LocoOptions options{};
  ShardOver shard_over = ShardOver::kShard;
};

std::vector<Outcome> outcomes_of(const RunMesh& run, MeshShape shape, const LocoCase& row) {
  std::vector<Sync> schedule;
  for (std::size_t s = 0; s < kSteps; ++s)
    schedule.insert(schedule.end(), {Sync::kShard, Sync::kAll});
  StepCase all = random_step(parameters(Dtype::kBf16), shape.size(), schedule, 1);
  (*all.gradients[2][2 * kOverflows + 1].back())[17] = std::numeric_limits<float>::infinity();
  std::vector<Outcome> outcomes(static_cast<std::size_t>(shape.size()));
  run(shape, [&](const Mesh& mesh) {
    Outcome& outcome = outcomes[static_cast<std::size_t>(mesh.rank())];
    const auto hop = std::make_shared<LocoHop>(row.options);
    Reducer reducer(mesh, {.bucket_bytes = 8192, .replica_hop = hop, .shard_over = row.shard_over});
    GpuRank rank(reducer, all, mesh);
    for (std::size_t s = 0; s < kSteps; ++s) {
      rank.run_microbatch(2 * s);
      rank.run_microbatch(2 * s + 1);
      outcome.steps.push_back(rank.read());
      EXPECT_EQ(reducer.found_inf(), s == kOverflows);
    }
    for (const HopState& one : hop->state()) {
      outcome.names.push_back(one.key);
      const auto* const begin = static_cast<const std::byte*>(one.data.data);
      outcome.state.emplace_back(begin, begin + one.data.size_in_bytes());
    }
  });
  return outcomes;
}

class CudaLoco : public ::testing::TestWithParam<LocoCase> {};

TEST_P(CudaLoco, HasTheBitsOfTheHost) {
  const RunMesh on_host = [](auto shape, const auto& body) { run_mesh(shape, body); };
  const RunMesh on_gpu = [](auto shape, const auto& body) { run_gpu_mesh(shape, body); };
  for (const MeshShape shape : {kSquare, MeshShape{3, 1}}) {
    const std::vector<Outcome> host = outcomes_of(on_host, shape, GetParam());
    const std::vector<Outcome> gpu = outcomes_of(on_gpu, shape, GetParam());
    for (std::size_t r = 0; r < host.size(); ++r) {
      const std::string rank = "rank " + std::to_string(r);
      for (std::size_t s = 0; s < kSteps; ++s) {
        for (std::size_t p = 0; p < host[r].steps[s].shards.size(); ++p) {
          expect_same_bits(gpu[r].steps[s].shards[p], host[r].steps[s].shards[p],
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
    ::testing::Values(
        LocoCase{}, LocoCase{{.reset_T = 2}},
        LocoCase{{.bits = 8, .error_dtype = Dtype::kF32, .gather = quant::Code::kBf16}},
        LocoCase{{.exclude = {"matrix"}, .stochastic_error = true}},
        LocoCase{{.error_feedback = false}}, LocoCase{{.reset_T = 2}, ShardOver::kMesh},
        LocoCase{{.bits = 8, .exclude = {"matrix"}, .warmup_steps = 1, .stochastic_error = true},
                 ShardOver::kMesh}));

}  // namespace
}  // namespace hsdp::test
