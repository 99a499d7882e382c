// zero::AdamW on a GPU's memory and streams, on the stand-in for the CUDA runtime: it gives the
// host's bits, and the host does not wait.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "cuda_stand_in.h"
#include "gpu_rank.h"
#include "hsdp/device/buffer.h"
#include "zero/adamw.h"

namespace hsdp::test {
namespace {

constexpr int kAdamWSteps = 3;
constexpr double kMaxNorm = 0.25;

// This rank's parameters after some steps. The host clips by scaling; a GPU gets a factor, and runs
// all steps but the first while it stands still.
std::vector<Values> adamw_values(const Mesh& mesh, const StepCase& step) {
  const Device device = mesh.device();
  const bool on_gpu = device == kGpu;
  Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
  GpuRank rank(reducer, step, mesh);
  reducer.prepare();
  std::vector<Buffer> memory;
  std::vector<Values> values;
  std::vector<zero::AdamWParameter> parameters;
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    const std::int64_t count = reducer.slice(step.parameters[p].name).count;
    Values& own = values.emplace_back();
    for (std::int64_t i = 0; i < count; ++i) {
      own.push_back(0.01F * static_cast<float>(i) - static_cast<float>(p));
    }
    memory.emplace_back(device, own.size() * sizeof(float) + sizeof(float));
    copy_bytes(memory.back().data(), own.data(), own.size() * sizeof(float), rank.stream());
    rank.stream().synchronize();
    parameters.push_back(
        {step.parameters[p].name, {memory.back().data(), count, Dtype::kF32, device}});
  }
  zero::AdamW optimizer(reducer, parameters);
  const Buffer found_inf(device, sizeof(float));
  const Buffer norm(device, sizeof(double));
  const Buffer factor(device, sizeof(float));
  Reducer* const reducers[] = {&reducer};
  std::optional<stand_in::Standstill> nothing_moves;
  for (int s = 0; s < kAdamWSteps; ++s) {
    rank.run();
    zero::AdamWUpdate update{.found_inf = reinterpret_cast<const float*>(found_inf.data())};
    if (on_gpu) {
      update.grad_factor = reinterpret_cast<const float*>(factor.data());
      clip_factor(reducers, kMaxNorm, norm.view(Dtype::kF64), factor.view(Dtype::kF32));
    } else {
      EXPECT_GT(reducer.clip_grad_norm(kMaxNorm), kMaxNorm);
    }
    rank.stream().wait(reducer.found_inf(found_inf.view(Dtype::kF32)));
    optimizer.update(rank.stream(), update);
    if (!on_gpu || s > 0) continue;
    rank.stream().synchronize();
    static_cast<void>(mesh.world().exchange("", "has its memory"));
    nothing_moves.emplace();
  }
  if (on_gpu) {
    EXPECT_FALSE(rank.stream().record().complete());
    static_cast<void>(mesh.world().exchange("", "enqueued"));
    nothing_moves.reset();
  }
  EXPECT_EQ(optimizer.steps(rank.stream()), kAdamWSteps);
  for (std::size_t p = 0; p < memory.size(); ++p) {
    copy_bytes(values[p].data(), memory[p].data(), values[p].size() * sizeof(float), rank.stream());
  }
  rank.stream().synchronize();
  return values;
}

TEST(AdamWOnGpu, HasTheBitsOfTheHostAndDoesNotHoldItUp) {
  const StepCase step =
      random_step(parameters(Dtype::kF32), kSquare.size(), {Sync::kShard, Sync::kAll}, 70);
  std::vector<std::vector<Values>> want(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    want[static_cast<std::size_t>(mesh.rank())] = adamw_values(mesh, step);
  });
  run_gpu_mesh(kSquare, [&](const Mesh& mesh) {
    const std::vector<Values> got = adamw_values(mesh, step);
    for (std::size_t p = 0; p < got.size(); ++p) {
      expect_same_bits(got[p], want[static_cast<std::size_t>(mesh.rank())][p],
                       step.parameters[p].name);
    }
  });
}

}  // namespace
}  // namespace hsdp::test
