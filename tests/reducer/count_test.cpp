// What a step costs, counted: collectives, wire bytes, memory.
#include <gtest/gtest.h>

#include <array>

#include "hsdp/reducer_internal.h"
#include "tests/support/reducer_step.h"
#include "tests/support/temporary_directory.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

constexpr int kMicrobatchCount = 4;

std::vector<ParameterSpec> counted_parameters() {
  return {{.name = "a", .shape = {1000, 3}, .dtype = Dtype::kBf16},
          {.name = "b", .shape = {77}, .dtype = Dtype::kBf16},
          {.name = "c", .shape = {64, 64}, .dtype = Dtype::kBf16}};
}

constexpr std::int64_t kTotalCount = 3000 + 77 + 4096;

ReducerStats difference(const ReducerStats& after, const ReducerStats& before) {
  ReducerStats d = after;
  d.reduce_scatter_count -= before.reduce_scatter_count;
  d.all_reduce_count -= before.all_reduce_count;
  d.all_gather_count -= before.all_gather_count;
  d.shard_hop_bytes -= before.shard_hop_bytes;
  d.replica_hop_bytes -= before.replica_hop_bytes;
  d.microbatch_count -= before.microbatch_count;
  d.step_count -= before.step_count;
  return d;
}

// What the second of two equal steps did, for each rank.
std::vector<ReducerStats> costs_of(MeshShape shape, Sync until_last,
                                   const ReducerOptions& options) {
  StepCase step = integer_step(counted_parameters(), shape.size(), kMicrobatchCount, 1);
  for (int m = 0; m + 1 < kMicrobatchCount; ++m) {
    step.schedule[static_cast<std::size_t>(m)] = until_last;
  }
  std::vector<ReducerStats> costs(static_cast<std::size_t>(shape.size()));
  run_reducers(shape, step, options, [&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, step, mesh.rank());
    const ReducerStats before = reducer.stats();
    run_step(reducer, step, mesh.rank());
    costs[static_cast<std::size_t>(mesh.rank())] = difference(reducer.stats(), before);
  });
  return costs;
}

class Counts : public testing::TestWithParam<MeshShape> {};

TEST_P(Counts, AreThoseOfMicrobatchesThatSynchronize) {
  const MeshShape shape = GetParam();
  for (const Sync until_last : {Sync::kShard, Sync::kNone}) {
    const int rounds = until_last == Sync::kShard ? kMicrobatchCount : 1;
    for (const std::int64_t bucket_bytes : {1 << 10, 1 << 20}) {
      std::int64_t replica_hop_bytes = 0;
      for (const ReducerStats& cost : costs_of(
               shape, until_last, {.replica_dtype = Dtype::kF32, .bucket_bytes = bucket_bytes})) {
        const int buckets = cost.bucket_count;
        if (bucket_bytes == 1 << 10) {
          EXPECT_GE(buckets, kTotalCount * 2 / bucket_bytes);
        } else {
          EXPECT_EQ(buckets, 1);
        }
        EXPECT_EQ(cost.reduce_scatter_count, shape.shard > 1 ? rounds * buckets : 0);
        EXPECT_EQ(cost.all_reduce_count, shape.replicate > 1 ? buckets : 0);
        EXPECT_EQ(cost.all_gather_count, 0);
        EXPECT_EQ(cost.microbatch_count, kMicrobatchCount);
        EXPECT_EQ(cost.step_count, 1);
        EXPECT_EQ(cost.shard_hop_bytes, shape.shard > 1 ? rounds * 2 * kTotalCount : 0);
        replica_hop_bytes += cost.replica_hop_bytes;
      }
      // Once a step, the replicas scatter and gather their shards, which together are the whole
      // gradient, in the replica dtype.
      EXPECT_EQ(replica_hop_bytes, shape.replicate > 1 ? shape.replicate * 2 * 4 * kTotalCount : 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, Counts,
                         testing::Values(MeshShape{1, 1}, MeshShape{2, 2}, MeshShape{1, 3},
                                         MeshShape{3, 1}, MeshShape{2, 3}),
                         [](const auto& row) { return to_string(row.param); });

TEST(Stats, NameEngineReductionHopAndTransports) {
  run_mesh({2, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {4}});
    const ReducerStats stats = reducer.stats();
    EXPECT_EQ(stats.engine, "host");
    EXPECT_EQ(stats.reduction, "exact");
    EXPECT_EQ(stats.replica_hop, PlainHop().describe());
    EXPECT_EQ(stats.shard_transport, name(mesh.shard_group().transport()));
    EXPECT_EQ(stats.replica_transport, name(mesh.replicate_group().transport()));
  });
}

TEST(Memory, ADefaultBucketGrowsWithTheMeshOnAGpu) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  for (const int ranks : {1, 512, 100000}) {
    EXPECT_EQ(default_bucket_bytes(DeviceType::kHost, ranks), 2 * kMiB);
  }
  EXPECT_EQ(default_bucket_bytes(DeviceType::kCuda, 1), 32 * kMiB);
  EXPECT_EQ(default_bucket_bytes(DeviceType::kCuda, 512), 32 * kMiB);
  EXPECT_EQ(default_bucket_bytes(DeviceType::kCuda, 1024), 64 * kMiB);
  EXPECT_EQ(default_bucket_bytes(DeviceType::kCuda, 100000), 128 * kMiB);
}

// A peak is recorded when it happens, not when it is read.
TEST(Memory, PeaksAreSeenAfterwards) {
  MemoryCount count;
  MemoryCount::Held carry = count.hold(MemoryKind::kCarry, 100);
  {
    const MemoryCount::Held hop = count.hold(MemoryKind::kReplicaHop, 40);
    carry = nullptr;
    const MemoryCount::Held more = MemoryCount(count).hold(MemoryKind::kReplicaHop, 70);
  }
  EXPECT_EQ(count.of(MemoryKind::kReplicaHop).live, 0);
  EXPECT_EQ(count.of(MemoryKind::kReplicaHop).peak, 110);
  EXPECT_EQ(count.all().live, 0);
  EXPECT_EQ(count.all().peak, 140);
}

// Small arrays share one message, which is allocated for the transfer only. Large arrays need none.
TEST(Memory, OfAGatherIsItsMessage) {
  constexpr std::int64_t kSmall = 1000;
  constexpr std::int64_t kLarge = 1 << 18;  // 1 MiB
  const MeshShape shape{.replicate = 1, .shard = 2};
  const StepCase step = integer_step({{.name = "a", .shape = {kSmall}},
                                      {.name = "large", .shape = {kLarge}},
                                      {.name = "b", .shape = {kSmall}}},
                                     shape.size(), 1, 3);
  run_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kLarge});  // a large array fills a message
    register_all(reducer, step);
    run_step(reducer, step, mesh.rank());
    Values a(kSmall);
    Values large(kLarge);
    Values b(kSmall);
    const NamedArray arrays[] = {{"a", {a.data(), kSmall, Dtype::kF32, {}}},
                                 {"large", {large.data(), kLarge, Dtype::kF32, {}}},
                                 {"b", {b.data(), kSmall, Dtype::kF32, {}}}};
    reducer.gather_gradients(arrays);
    reducer.gather_parameters(arrays);
    EXPECT_EQ(ReducerInternal(reducer).memory_count().of(MemoryKind::kParameterGather).peak,
              2 * kSmall * 4);
    EXPECT_EQ(reducer.stats().parameter_gather_bytes, 0) << "given back";
  });
}

TEST(Memory, OfASnapshotsCopyIsCounted) {
  const TemporaryDirectory folder;
  run_mesh({1, 1}, [&](const Mesh& mesh) {
    const StepCase step = integer_step({{.name = "w", .shape = {1 << 16}}}, 1, 1, 3);
    Reducer reducer(mesh);
    register_all(reducer, step);
    run_step(reducer, step, 0);
    const std::int64_t before = reducer.stats().peak_resident_bytes;
    reducer.save_snapshot(folder / "a", 1);
    reducer.flush_snapshots();
    EXPECT_GE(reducer.stats().peak_resident_bytes, before + (4 << 16));
    EXPECT_GE(reducer.stats().snapshot_bytes, 4 << 16) << "kept for the next";
  });
}

// All gradients arrive while the first bucket's is held back, so they are kept by reference. After
// a local microbatch they are added to the local sums instead, unless that would round once more.
TEST(Memory, GradientsThatFindNoStagingAreRetainedOrJoinTheLocalSums) {
  struct Row {
    std::vector<Sync> schedule;
    AccumulateDtype sums;
    bool retained;
  };
  constexpr std::int64_t kBucketBytes = 512;
  std::vector<ParameterSpec> specs;
  for (int p = 0; p < 16; ++p) {
    specs.push_back({.name = "w" + std::to_string(p), .shape = {256}, .dtype = Dtype::kBf16});
  }
  for (const Row& row : {Row{{Sync::kAll}, AccumulateDtype::kF32, true},
                         Row{{Sync::kNone, Sync::kAll}, AccumulateDtype::kF32, false},
                         Row{{Sync::kNone, Sync::kAll}, AccumulateDtype::kParam, true}}) {
    const StepCase step = random_step(specs, 2, row.schedule, 5);
    const ReducerOptions options{.bucket_bytes = kBucketBytes, .accumulate_dtype = row.sums};
    expect_result({1, 2}, step, options, [&](Reducer& reducer, const Mesh& mesh) {
      const int last = static_cast<int>(row.schedule.size()) - 1;
      for (int m = 0; m < last; ++m) {
        run_microbatch(reducer, step, m, mesh.rank(), {.sync = Sync::kNone});
      }
      reducer.begin_microbatch({.sync = Sync::kAll});
      ASSERT_EQ(reducer.stats().bucket_count, 16);
      std::vector<StoredGradient> stored;
      for (std::size_t p = specs.size(); p-- > 0;) {
        if (p == 0) {  // fifteen gradients and two staging buckets
          EXPECT_GE(reducer.stats().retained_bytes, row.retained ? 13 * kBucketBytes : 0);
          EXPECT_LE(reducer.stats().retained_bytes, row.retained ? 15 * kBucketBytes : 0);
        }
        stored.push_back(gradient_of(step, p, last, mesh.rank()));
        reducer.gradient_ready(static_cast<int>(p), stored.back().view());
      }
      reducer.end_microbatch();
      EXPECT_EQ(reducer.stats().retained_bytes, 0);
      EXPECT_GE(reducer.stats().peak_retained_bytes, row.retained ? 13 * kBucketBytes : 0);
    });
  }
}

}  // namespace
}  // namespace hsdp
