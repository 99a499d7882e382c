// Traces and wait tables when a GPU does the work and hosts only issue it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "gpu_rank.h"
#include "hsdp/comm/operation_record.h"
#include "hsdp/trace.h"
#include "hsdp/wait_table.h"
#include "nccl_ranks.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/trace_file.h"

namespace hsdp::test {
namespace {

constexpr int kSteps = 3;
constexpr std::chrono::milliseconds kDelay{250};

StepCase gpu_step() {
  return random_step(parameters(Dtype::kF32), kSquare.size(), {Sync::kShard, Sync::kAll}, 5);
}

TEST(TraceOnNccl, ShowsEveryBucketAsTheHostIssuedIt) {
  const TemporaryDirectory folder;
  const StepCase step = gpu_step();
  int buckets = 0;
  run_nccl_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
    static_cast<void>(rank.run_step());
    Trace trace(reducer, folder / "trace.json");
    for (int i = 0; i < kSteps; ++i) static_cast<void>(rank.run_step());
    trace.write();
    static_cast<void>(rank.run_step());
    if (mesh.rank() == 0) buckets = reducer.stats().bucket_count;
  });
  EXPECT_GT(buckets, 1);
  const TraceFile trace = read_trace(folder / "trace.json");
  expect_whole_trace(trace, kSquare, kSteps, buckets);
  expect_flows(trace, kSquare, kSteps, buckets);
  EXPECT_EQ(trace.other.at("engine"), "nccl");
  EXPECT_THAT(trace.other.at("times"), testing::HasSubstr("issues the GPU's work"));
  for (const TraceSlice& one : trace.of(0, "shard_hop")) EXPECT_EQ(one.args.at("state"), "issued");
}

TEST(WaitTableOnNccl, NamesTheRankWhoseWordsComeLate) {
  const StepCase step = gpu_step();
  for (const int late : {0, 3}) {
    run_nccl_mesh(kSquare, [&](const Mesh& mesh) {
      Reducer reducer(mesh);  // a bucket: a busy machine holds ranks up in every operation
      GpuRank rank(reducer, step, mesh);
      const double begin_s = Operations::now_s();
      for (int i = 0; i < kSteps; ++i) {
        if (mesh.rank() == late) std::this_thread::sleep_for(kDelay);
        static_cast<void>(rank.run_step());
      }
      const double elapsed_s = Operations::now_s() - begin_s;
      const WaitTable table = reducer.wait_table();
      EXPECT_EQ(table.straggler, late) << table.text();
      EXPECT_GT(table.operations, 0);
      double seconds = 0;
      for (const WaitTable::Wait& wait : table.waits) {
        if (wait.awaited == late) seconds += wait.seconds;
        EXPECT_LT(wait.seconds, elapsed_s) << "a hop that was only issued waits for nobody";
      }
      EXPECT_GT(seconds, std::chrono::duration<double>(kDelay).count());
    });
  }
}

}  // namespace
}  // namespace hsdp::test
