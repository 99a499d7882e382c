// A plan for a GPU, made before anything is allocated, equals what stats() counts there, on the
// stand-in for the CUDA runtime. The collectives are the host's and take no work memory.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "gpu_rank.h"
#include "quant/loco_hop.h"
#include "tests/support/planned_fields.h"

namespace hsdp::test {
namespace {

constexpr int kPlannedSteps = 2;

void expect_planned_on_gpu(MeshShape shape, ShardOver over, bool is_loco) {
  SCOPED_TRACE(to_string(shape) + " over " + std::string(word_of(over)));
  const StepCase step =
      random_step(parameters(Dtype::kBf16), shape.size(), {Sync::kNone, Sync::kAll}, 70);
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    ReducerOptions options{.bucket_bytes = kSmallBuckets, .shard_over = over};
    if (is_loco) options.replica_hop = std::make_shared<quant::LocoHop>();
    Reducer reducer(mesh, options);
    GpuRank rank(reducer, step, mesh);
    const MemoryUse use{.local_sums = AccumulateDtype::kF32};
    const MemoryPlan plan = reducer.memory_plan(use);
    EXPECT_GT(plan.scratch_bytes, 0);
    for (int s = 0; s < kPlannedSteps; ++s) static_cast<void>(rank.run_step());
    EXPECT_EQ(fields_of(plan), counted_fields(reducer.stats(), kPlannedSteps, kPlannedSteps));
    EXPECT_EQ(fields_of(plan), fields_of(reducer.memory_plan(use)));
  });
}

TEST(MemoryPlanOnGpu, IsWhatAReducerHolds) {
  for (const MeshShape shape : {MeshShape{1, 2}, kSquare, MeshShape{2, 1}}) {
    for (const ShardOver over : {ShardOver::kShard, ShardOver::kMesh}) {
      for (const bool is_loco : {false, true}) expect_planned_on_gpu(shape, over, is_loco);
    }
  }
}

}  // namespace
}  // namespace hsdp::test
