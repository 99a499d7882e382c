// zero::AdamW on the memory and the streams of a GPU, on the stand-in for the CUDA runtime: the
// bits of the host, which clips by scaling there, and that the host does not wait.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda_stand_in.h"
#include "device_rank.h"
#include "hsdp/device/buffer.h"
#include "tests/support/reducer_step.h"
#include "zero/adamw.h"

namespace hsdp {
namespace {

using stand_in::kGpu;
using stand_in::Rank;

constexpr int kAdamWSteps = 3;
constexpr double kMaxNorm = 0.25;

std::vector<float> parameter_values(std::size_t p, const Slice& own) {
  std::vector<float> values(static_cast<std::size_t>(own.count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = 0.01F * static_cast<float>(i) - static_cast<float>(p);
  }
  return values;
}

// By a Reducer on the host; [rank][parameter].
std::vector<std::vector<test::Values>> adamw_on_host(const test::StepCase& step,
                                                     test::MeshShape shape) {
  std::vector<std::vector<test::Values>> all(static_cast<std::size_t>(shape.size()));
  test::run_mesh(shape, [&](const Mesh& mesh) {
    std::vector<test::Values>& values = all[static_cast<std::size_t>(mesh.rank())];
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    test::register_all(reducer, step);
    reducer.prepare();
    std::vector<zero::AdamWParameter> parameters;
    for (std::size_t p = 0; p < step.parameters.size(); ++p) {
      values.push_back(parameter_values(p, reducer.slice(step.parameters[p].name)));
    }
    for (std::size_t p = 0; p < values.size(); ++p) {
      parameters.push_back(
          {step.parameters[p].name,
           {values[p].data(), static_cast<std::int64_t>(values[p].size()), Dtype::kF32, {}}});
    }
    zero::AdamW optimizer(reducer, parameters);
    Stream stream = Stream::inline_host();
    for (int s = 0; s < kAdamWSteps; ++s) {
      static_cast<void>(test::run_step(reducer, step, mesh.rank()));
      EXPECT_GT(reducer.clip_grad_norm(kMaxNorm), kMaxNorm);
      float found_inf = 0.0F;
      stream.wait(reducer.found_inf({&found_inf, 1, Dtype::kF32, {}}));
      optimizer.update(stream, {.found_inf = &found_inf});
    }
  });
  return all;
}

TEST(AdamWOnGpu, HasTheBitsOfTheHostAndDoesNotHoldItUp) {
  const test::MeshShape shape = test::kSquare;
  const test::StepCase step = test::random_step(stand_in::parameters(Dtype::kF32), shape.size(),
                                                {Sync::kShard, Sync::kAll}, 70);
  const std::vector<std::vector<test::Values>> want = adamw_on_host(step, shape);
  stand_in::run_gpu_mesh(shape, [&](const Mesh& mesh) {
    const std::vector<test::Values>& wanted = want[static_cast<std::size_t>(mesh.rank())];
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    test::register_all(reducer, step);
    reducer.prepare();
    Rank rank(reducer, step, mesh.rank());
    std::vector<Buffer> memory;
    std::vector<zero::AdamWParameter> parameters;
    for (std::size_t p = 0; p < step.parameters.size(); ++p) {
      const Slice own = reducer.slice(step.parameters[p].name);
      const std::vector<float> values = parameter_values(p, own);
      memory.emplace_back(kGpu, values.size() * sizeof(float) + sizeof(float));
      copy_bytes(memory.back().data(), values.data(), values.size() * sizeof(float), rank.stream());
      rank.stream().synchronize();
      parameters.push_back(
          {step.parameters[p].name, {memory.back().data(), own.count, Dtype::kF32, kGpu}});
    }
    zero::AdamW optimizer(reducer, parameters);
    const Buffer found_inf(kGpu, sizeof(float));
    const Buffer norm(kGpu, sizeof(double));
    const Buffer factor(kGpu, sizeof(float));
    Reducer* const reducers[] = {&reducer};
    const auto run_one = [&] {
      rank.run_steps();
      static_cast<void>(reducer.found_inf(found_inf.view(Dtype::kF32)));
      clip_factor(reducers, kMaxNorm, norm.view(Dtype::kF64), factor.view(Dtype::kF32));
      optimizer.update(rank.stream(),
                       {.grad_factor = reinterpret_cast<const float*>(factor.data()),
                        .found_inf = reinterpret_cast<const float*>(found_inf.data())});
    };
    run_one();  // takes its memory
    rank.stream().synchronize();
    static_cast<void>(mesh.world().exchange("", "ready"));
    {
      const stand_in::Standstill nothing_moves;
      for (int s = 1; s < kAdamWSteps; ++s) run_one();
      EXPECT_FALSE(rank.stream().record().complete());
      static_cast<void>(mesh.world().exchange("", "enqueued"));
    }
    EXPECT_EQ(optimizer.steps(rank.stream()), kAdamWSteps);
    for (std::size_t p = 0; p < memory.size(); ++p) {
      test::Values got(wanted[p].size());
      copy_bytes(got.data(), memory[p].data(), got.size() * sizeof(float), rank.stream());
      rank.stream().synchronize();
      test::expect_same_bits(got, wanted[p], step.parameters[p].name);
    }
  });
}

}  // namespace
}  // namespace hsdp
