// The order in which the Reducers of a mesh issue their collectives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "nccl_gpu_rank.h"

namespace hsdp::test {
namespace {

using stand_in::NcclCall;

// The groups of calls that a rank issued, each as its name and the communicator's number.
std::vector<std::string> groups_of(int rank, const std::map<int, std::string>& names) {
  std::vector<std::string> groups;
  int last = -1;
  for (const NcclCall& call : nccl_stand_in().calls(rank)) {
    if (call.group != last) groups.push_back(names.at(call.communicator));
    last = call.group;
  }
  return groups;
}

// "A shard" for the first communicator that the rank used, and so on.
std::map<int, std::string> names_by_use(int rank, const std::vector<std::string>& names) {
  std::map<int, std::string> by_number;
  for (const NcclCall& call : nccl_stand_in().calls(rank)) {
    if (by_number.size() < names.size())
      by_number.emplace(call.communicator, names[by_number.size()]);
  }
  return by_number;
}

TEST(NcclOrder, AReplicaHopComesAfterTheNextShardHop) {
  const LaunchOrderCounts counts;
  const MeshShape shape{2, 2};
  StepCase step = integer_step({{.name = "w", .shape = {4096}}}, 4, 1, 3);
  step.schedule = {Sync::kAll};
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
    static_cast<void>(rank.run_step());
    ASSERT_EQ(reducer.stats().bucket_count, 4);
  });
  for (int rank = 0; rank < 4; ++rank) {
    const auto names = names_by_use(rank, {"shard", "replica"});
    // A replica hop is two groups: rows, then totals.
    EXPECT_THAT(
        groups_of(rank, names),
        ::testing::ElementsAre("shard", "shard", "replica", "replica", "shard", "replica",
                               "replica", "shard", "replica", "replica", "replica", "replica"));
    for (const NcclCall& call : nccl_stand_in().calls(rank)) {
      EXPECT_EQ(call.ranks, 2) << call.name;
    }
  }
}

// On the caller's thread, beside the one that issues the hops.
TEST(NcclOrder, ACollectiveAfterAMicrobatchComesAfterItsHops) {
  const LaunchOrderCounts counts;
  const MeshShape shape{2, 2};
  StepCase step = integer_step({{.name = "w", .shape = {4096}}}, 4, 1, 3);
  step.schedule = {Sync::kAll};
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 512});
    GpuRank rank(reducer, step, mesh);
    std::vector<float> value(4, 1.0F);
    Stream stream = Stream::create(mesh.device(), "caller");
    for (int repeat = 0; repeat < 3; ++repeat) {
      rank.run_microbatch(0);
      mesh.world().all_reduce(TensorView{value.data(), 4, Dtype::kF32, mesh.device()}, stream);
    }
    stream.synchronize();
    EXPECT_EQ(value[3], 64.0F);
  });
  for (int rank = 0; rank < 4; ++rank) {
    // Hops are of two ranks; the collective's calls, which are of four, come together.
    int blocks = 0;
    int last = 2;
    for (const NcclCall& call : nccl_stand_in().calls(rank)) {
      blocks += call.ranks == 4 && last == 2 ? 1 : 0;
      last = call.ranks;
    }
    EXPECT_EQ(blocks, 3);
    EXPECT_EQ(last, 4);
  }
}

// The order of two Reducers whose blocks overlap, with gradients that come in another order on each
// rank.
TEST(NcclOrder, OverlappingReducersIssueInOneOrderOnEveryRank) {
  const LaunchOrderCounts counts;
  const MeshShape shape{2, 2};
  constexpr std::size_t kParameters = 6;
  const auto specs = [](const std::string& prefix) {
    std::vector<ParameterSpec> all;
    for (std::size_t p = 0; p < kParameters; ++p) {
      all.push_back({.name = prefix + std::to_string(p), .shape = {700}});
    }
    return all;
  };
  std::vector<StepCase> steps;
  for (const char* prefix : {"a", "b"}) {
    steps.push_back(random_step(specs(prefix), 4, {Sync::kShard, Sync::kAll}, 11));
  }
  const ReducerOptions options{.bucket_bytes = kSmallBuckets};
  std::vector<std::vector<RankResult>> results(2, std::vector<RankResult>(4));
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    Reducer first(mesh, options);
    Reducer second(mesh, options);
    GpuRank a(first, steps[0], mesh);
    GpuRank b(second, steps[1], mesh);
    const auto r = static_cast<std::size_t>(mesh.rank());
    for (int repeat = 0; repeat < 3; ++repeat) {
      for (std::size_t m = 0; m < 2; ++m) {
        a.begin(m);
        b.begin(m);
        for (std::size_t p = 0; p < kParameters; ++p) {
          GpuRank& one = r % 2 == 0 ? a : b;
          GpuRank& other = r % 2 == 0 ? b : a;
          one.hand_over((p + r) % kParameters, m);
          other.hand_over(kParameters - 1 - p, m);
        }
        first.end_microbatch();
        second.end_microbatch();
      }
    }
    results[0][r] = a.read();
    results[1][r] = b.read();
  });
  expect_reference(results[0], steps[0], options, shape, "first");
  expect_reference(results[1], steps[1], options, shape, "second");
  // Communicators are numbered by the library; ranks of one shard group share theirs, and what
  // differs is told apart by first use in one order.
  std::vector<std::vector<std::string>> orders;
  for (int rank = 0; rank < 4; ++rank) {
    orders.push_back(groups_of(rank, names_by_use(rank, {"w", "x", "y", "z"})));
  }
  for (int rank = 1; rank < 4; ++rank) EXPECT_EQ(orders[static_cast<std::size_t>(rank)], orders[0]);
  EXPECT_GT(orders[0].size(), 60U);
}

// A block inside another one, and a block that ends while the other has not got a gradient yet.
TEST(NcclOrder, BlocksMayNestAndEndInAnyOrder) {
  const MeshShape shape{1, 2};
  std::vector<StepCase> steps;
  for (const char* name : {"a", "b"}) {
    steps.push_back(random_step({{.name = name, .shape = {9000}}}, 2, {Sync::kAll}, 21));
  }
  const ReducerOptions options{.bucket_bytes = kSmallBuckets};
  std::vector<std::vector<RankResult>> results(2, std::vector<RankResult>(2));
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    Reducer first(mesh, options);
    Reducer second(mesh, options);
    GpuRank a(first, steps[0], mesh);
    GpuRank b(second, steps[1], mesh);
    a.begin(0);
    b.begin(0);
    b.hand_over(0, 0);
    second.end_microbatch();
    a.hand_over(0, 0);
    first.end_microbatch();
    const auto r = static_cast<std::size_t>(mesh.rank());
    b.begin(0);
    a.begin(0);
    b.hand_over(0, 0);
    second.end_microbatch();
    a.hand_over(0, 0);
    first.end_microbatch();
    results[0][r] = a.read();
    results[1][r] = b.read();
  });
  expect_reference(results[0], steps[0], options, shape, "first");
  expect_reference(results[1], steps[1], options, shape, "second");
}

// One rank reads what the second Reducer gives before it hands anything to the first, whose buckets
// the others have ready and would send first.
TEST(NcclOrder, ARankMayFinishWithOneReducerBeforeItBeginsWithAnother) {
  const LaunchOrderCounts counts;
  const MeshShape shape{1, 3};
  constexpr int kSteps = 3;  // the rank that does so is another one in each
  std::vector<StepCase> steps;
  for (const char* name : {"a", "b"}) {
    steps.push_back(random_step({{.name = name, .shape = {9000}}}, 3, {Sync::kAll}, 31));
  }
  const ReducerOptions options{.bucket_bytes = kSmallBuckets};
  std::vector<std::vector<RankResult>> results(2, std::vector<RankResult>(3));
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    Reducer first(mesh, options);
    Reducer second(mesh, options);
    GpuRank a(first, steps[0], mesh);
    GpuRank b(second, steps[1], mesh);
    const auto r = static_cast<std::size_t>(mesh.rank());
    for (int step = 0; step < kSteps; ++step) {
      a.begin(0);
      b.begin(0);
      if (step != mesh.rank()) a.hand_over(0, 0);
      b.hand_over(0, 0);
      second.end_microbatch();
      if (step == mesh.rank()) {
        results[1][r] = b.read();
        a.hand_over(0, 0);
      }
      first.end_microbatch();
      results[1][r] = b.read();
      results[0][r] = a.read();
    }
  });
  expect_reference(results[0], steps[0], options, shape, "first");
  expect_reference(results[1], steps[1], options, shape, "second");
}

// A bucket without gradients on one rank leaves there at the microbatch's end, long after the
// others have it ready.
TEST(NcclOrder, ABucketThatIsAHoleOnOneRankHoldsUpNoOtherReducer) {
  const MeshShape shape{1, 2};
  const std::vector<ParameterSpec> two{{.name = "unused", .shape = {1024}},
                                       {.name = "used", .shape = {1024}}};
  StepCase holes = random_step(two, 2, {Sync::kAll}, 41);
  holes.gradients[0][0][1].reset();
  const StepCase whole = random_step({{.name = "b", .shape = {9000}}}, 2, {Sync::kAll}, 42);
  const ReducerOptions options{.bucket_bytes = kSmallBuckets};
  ReducerOptions with_holes = options;
  with_holes.missing = Missing::kZero;
  std::vector<std::vector<RankResult>> results(2, std::vector<RankResult>(2));
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    Reducer first(mesh, with_holes);
    Reducer second(mesh, options);
    GpuRank a(first, holes, mesh);
    GpuRank b(second, whole, mesh);
    const auto r = static_cast<std::size_t>(mesh.rank());
    a.begin(0);
    b.begin(0);
    if (r == 0) a.hand_over(0, 0);
    a.hand_over(1, 0);
    b.hand_over(0, 0);
    second.end_microbatch();
    results[1][r] = b.read();
    first.end_microbatch();
    results[0][r] = a.read();
  });
  expect_reference(results[0], holes, with_holes, shape, "with a hole");
  expect_reference(results[1], whole, options, shape, "without");
}

// Then the ranks have other tasks in other places, and the status word still says what is wrong.
TEST(NcclOrder, RanksThatDisagreeAboutTheirSyncAreToldSo) {
  std::vector<StepCase> steps;
  for (const char* name : {"a", "b"}) {
    steps.push_back(random_step({{.name = name, .shape = {9000}}}, 2, {Sync::kAll}, 51));
  }
  for (const int odd : {0, 1}) {
    run_nccl_mesh({1, 2}, [&](const Mesh& mesh) {
      StepCase own = steps[0];
      if (mesh.rank() == odd) own.schedule = {Sync::kNone};
      const auto disagree = [&] {
        Reducer first(mesh, {.bucket_bytes = kSmallBuckets});
        Reducer second(mesh, {.bucket_bytes = kSmallBuckets});
        GpuRank a(first, own, mesh);
        GpuRank b(second, steps[1], mesh);
        a.begin(0);
        b.begin(0);
        b.hand_over(0, 0);
        a.hand_over(0, 0);
        first.end_microbatch();
        second.end_microbatch();
        first.finish();
        second.finish();
      };
      EXPECT_THROW(disagree(), MismatchError) << "rank " << mesh.rank();
    });
  }
}

}  // namespace
}  // namespace hsdp::test
