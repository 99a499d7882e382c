// Gradients of f64: sums, means, norms and clipping in f64, on every mesh and transport.
#include <gtest/gtest.h>

#include "tests/support/reducer_step.h"
#include "tests/support/wide_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

class WideGradients : public testing::TestWithParam<MeshShape> {};

TEST_P(WideGradients, StayF64WhateverTheWires) {
  using SyncsOfAStep = std::vector<std::optional<Sync>>;
  constexpr Sync none = Sync::kNone;
  constexpr Sync shard = Sync::kShard;
  constexpr Sync all = Sync::kAll;
  const std::vector<ReducerOptions> options{
      {.bucket_bytes = 1 << 10},
      {.layout = Layout::kDim0, .bucket_bytes = 1 << 10},
      {.layout = Layout::kWhole, .bucket_bytes = 1 << 10},
      {.bucket_bytes = 1 << 10, .shard_over = ShardOver::kMesh},
      {.layout = Layout::kDim0, .bucket_bytes = 1 << 10, .shard_over = ShardOver::kMesh},
      {.reduce_dtype = Dtype::kF32, .replica_dtype = Dtype::kF32},
      {.replica_hop = std::make_shared<PlainHop>(Dtype::kF32)}};
  for (const ReducerOptions& one : options) {
    for (const SyncsOfAStep& schedule :
         {SyncsOfAStep{shard, shard, all}, SyncsOfAStep{none, none, all},
          SyncsOfAStep{std::nullopt, none, shard, all}}) {
      run_mesh(GetParam(), [&](const Mesh& mesh) {
        ReducerOptions own = one;
        if (one.replica_hop) own.replica_hop = std::make_shared<PlainHop>(Dtype::kF32);
        expect_wide_step(mesh, own, schedule);
      });
    }
  }
}

TEST_P(WideGradients, TravelByTcpToo) {
  run_mesh(GetParam(),
           [](const Mesh& mesh) {
             expect_wide_step(mesh, {.bucket_bytes = 1 << 10}, {Sync::kShard, Sync::kAll});
           },
           {.transport = TransportChoice::kTcp});
}

TEST(WideGradient, IsRefusedWhereItWouldBeRounded) {
  run_mesh({1, 1}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {1}, .dtype = Dtype::kF64});
    const float narrow = 1.0F;
    reducer.begin_microbatch({.last = true});
    EXPECT_THROW(reducer.gradient_ready("w", {&narrow, Dtype::kF32, {}, {1}, {}}), UsageError);
    EXPECT_THROW(reducer.end_microbatch(), UsageError);
    const double value = 1.0 + 0x1p-40;
    reducer.begin_microbatch({.sync = Sync::kNone});
    reducer.gradient_ready("w", {&value, Dtype::kF64, {}, {1}, {}});
    reducer.end_microbatch();
    EXPECT_THROW(static_cast<void>(reducer.local_sum("w")), UsageError) << "a vector of float";
    double sum = 0.0;
    reducer.local_sum("w", {&sum, 1, Dtype::kF64, {}});
    EXPECT_EQ(sum, value);
    reducer.discard();
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, WideGradients,
                         testing::Values(MeshShape{1, 1}, MeshShape{1, 3}, MeshShape{3, 1},
                                         MeshShape{2, 2}));

}  // namespace
}  // namespace hsdp
