// Results that a Reducer leaves on the GPU, on the stand-in for the CUDA runtime.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_stand_in.h"
#include "device_rank.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

using stand_in::kGpu;
using stand_in::parameters;
using stand_in::Rank;
using stand_in::run_gpu_mesh;
using test::Values;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class GpuResults : public ::testing::TestWithParam<test::MeshShape> {};

TEST_P(GpuResults, FoundInfIsOneOrZeroOnTheDevice) {
  const test::MeshShape shape = GetParam();
  test::StepCase step =
      test::random_step(parameters(Dtype::kBf16), shape.size(), {Sync::kAll, Sync::kAll}, 8);
  for (auto& gradient : step.gradients[2][0]) {  // on every rank: a sum of ones is still 1
    (*gradient)[4000] = std::numeric_limits<float>::infinity();
  }
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    rank.run_microbatch(0, {.last = true});
    std::vector<float> words{-1.0F, -1.0F};
    static_cast<void>(mesh.world().exchange("", "ready"));
    {
      const stand_in::Standstill nothing_moves;
      reducer.found_inf({words.data(), 1, Dtype::kF32, kGpu});
      EXPECT_FALSE(rank.stream().record().complete());
    }
    const ReducerStats before = reducer.stats();
    rank.run_microbatch(1, {.last = true});
    reducer.found_inf({words.data() + 1, 1, Dtype::kF32, kGpu});
    rank.stream().synchronize();
    EXPECT_THAT(words, ::testing::ElementsAre(1.0F, 0.0F));
    const std::int64_t replica_hops = shape.replicate > 1 ? before.bucket_count : 0;
    EXPECT_EQ(reducer.stats().all_reduce_count, before.all_reduce_count + replica_hops);
  });
}

TEST_P(GpuResults, ClippingGivesTheBitsOfTheHostWithoutWaiting) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step =
      test::random_step(parameters(Dtype::kBf16), shape.size(), {Sync::kAll, Sync::kAll}, 13);
  for (const double max_norm : {0.25, 1e9}) {
    run_gpu_mesh(shape, [&](const Mesh& mesh) {
      Reducer one(mesh, {.bucket_bytes = 4096});
      Reducer other(mesh, {.bucket_bytes = 4096});
      const std::vector<Reducer*> both{&one, &other};
      std::vector<test::Values> clipped;
      std::vector<double> norms(4);
      for (const bool on_device : {false, true}) {
        std::vector<std::unique_ptr<Rank>> ranks;
        for (Reducer* reducer : both) {
          if (!on_device) test::register_all(*reducer, step);
          ranks.push_back(std::make_unique<Rank>(*reducer, step, mesh.rank()));
          ranks.back()->run_microbatch(reducer == &one ? 0 : 1, {.last = true});
        }
        if (on_device) {
          static_cast<void>(one.grad_norm());  // everything so far is done
          static_cast<void>(other.grad_norm());
          static_cast<void>(mesh.world().exchange("", "ready"));
          const stand_in::Standstill nothing_moves;
          one.grad_norm({norms.data() + 2, 1, Dtype::kF64, kGpu});
          clip_grad_norm(both, max_norm, {norms.data() + 3, 1, Dtype::kF64, kGpu});
          EXPECT_FALSE(ranks[0]->stream().record().complete());
        } else {
          norms[0] = one.grad_norm();
          norms[1] = clip_grad_norm(both, max_norm);
        }
        for (Reducer* reducer : both) {
          const TensorView shard = reducer->shard("large");
          ranks[0]->stream().synchronize();
          ranks[1]->stream().synchronize();
          clipped.push_back(test::values_of(shard));
        }
      }
      EXPECT_EQ(norms[2], norms[0]);
      EXPECT_EQ(norms[3], norms[1]);
      EXPECT_GT(norms[1], norms[0]);
      test::expect_same_bits(clipped[2], clipped[0], "one");
      test::expect_same_bits(clipped[3], clipped[1], "other");
    });
  }
}

TEST_P(GpuResults, PartialsAreReadInStreamOrder) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step =
      test::random_step(parameters(Dtype::kBf16), shape.size(), {Sync::kShard, Sync::kAll}, 11);
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    rank.run_microbatch(0, {.last = false});
    const std::vector<float> want = reducer.partial_shard("large");
    std::vector<float> got(want.size());
    const TensorView out{got.data(), reducer.slice("large").count, Dtype::kF32, kGpu};
    static_cast<void>(mesh.world().exchange("", "ready"));
    {
      const stand_in::Standstill nothing_moves;
      reducer.partial_shard("large", out);
      EXPECT_FALSE(rank.stream().record().complete());
    }
    rank.stream().synchronize();
    test::expect_same_bits(got, want, "partial");
    reducer.discard();
  });
}

TEST_P(GpuResults, BucketsAreThoseOfAGpu) {
  run_gpu_mesh(GetParam(), [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {5 << 20}});
    reducer.begin_microbatch();
    EXPECT_EQ(reducer.stats().bucket_count, 1);
    reducer.abandon_step("of the test");
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, GpuResults,
                         ::testing::Values(test::MeshShape{1, 1}, test::MeshShape{1, 2},
                                           test::MeshShape{2, 1}, test::MeshShape{2, 2}),
                         ::testing::PrintToStringParamName());

TEST(GpuOutputs, MustFitAndLieOnTheMeshsDevice) {
  run_gpu_mesh({1, 1}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {2, 2}});
    std::vector<float> values(4);
    EXPECT_THAT(([&] {
                  reducer.found_inf({values.data(), 1, Dtype::kF32, {}});
                }),
                ThrowsMessage<UsageError>(HasSubstr("1 f32 on cuda:0, got 1 f32 on cpu")));
    EXPECT_THAT(([&] {
                  reducer.found_inf({values.data(), 1, Dtype::kI64, kGpu});
                }),
                ThrowsMessage<UsageError>(HasSubstr("got 1 i64 on cuda:0")));
    EXPECT_THAT(([&] {
                  reducer.found_inf({nullptr, 1, Dtype::kF32, kGpu});
                }),
                ThrowsMessage<UsageError>(HasSubstr("got a null pointer")));
    values[0] = 7.0F;
    reducer.found_inf({values.data(), 1, Dtype::kF32, kGpu}).wait();
    EXPECT_EQ(values[0], 0.0F);  // no step, nothing met
    const NamedArray elsewhere{"w", {values.data(), 4, Dtype::kF32, {DeviceType::kCuda, 1}}};
    EXPECT_THAT(([&] { reducer.gather_gradients(std::span(&elsewhere, 1)); }),
                ThrowsMessage<UsageError>(HasSubstr("expected memory on cuda:0, the mesh's device, "
                                                    "got cuda:1")));
  });
}

}  // namespace
}  // namespace hsdp
