// The order in which the Reducers of a mesh issue their collectives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "gpu_rank.h"
#include "hsdp/error.h"
#include "nccl_ranks.h"

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
  const StepCase step = integer_step({{.name = "w", .shape = {4096}}}, 4, 1, 3);
  run_nccl_mesh(kSquare, [&](const Mesh& mesh) {
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
  const StepCase step = integer_step({{.name = "w", .shape = {4096}}}, 4, 1, 3);
  run_nccl_mesh(kSquare, [&](const Mesh& mesh) {
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
    // A hop has two ranks. The collective has four, whose calls come together.
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

// Two Reducers of a mesh, on one rank.
struct TwoReducers {
  Reducer& first;
  Reducer& second;
  GpuRank& a;  // of the first
  GpuRank& b;
  int rank;
};
struct TwoSteps {
  StepCase first;
  StepCase second;
  Missing missing = Missing::kError;  // in the first
};

// Both Reducers have the reference's bits after the body.
void run_two_reducers(MeshShape shape, const TwoSteps& steps,
                      const std::function<void(const TwoReducers&)>& body) {
  ReducerOptions options{.bucket_bytes = kSmallBuckets};
  ReducerOptions of_first = options;
  of_first.missing = steps.missing;
  std::vector<RankResult> results(static_cast<std::size_t>(shape.size()));
  const auto results_of_first = nccl_results(shape, [&](const Mesh& mesh) {
    Reducer first(mesh, of_first);
    Reducer second(mesh, options);
    GpuRank a(first, steps.first, mesh);
    GpuRank b(second, steps.second, mesh);
    body({first, second, a, b, mesh.rank()});
    results[static_cast<std::size_t>(mesh.rank())] = b.read();
    return a.read();
  });
  expect_reference(results_of_first, steps.first, of_first, shape, "first");
  expect_reference(results, steps.second, options, shape, "second");
}

// Of one parameter in several buckets.
TwoSteps large_steps(int ranks, std::uint64_t seed) {
  const auto step = [&](const char* name) {
    return random_step({{.name = name, .shape = {9000}}}, ranks, {Sync::kAll}, seed);
  };
  return {step("a"), step("b")};
}

// The order of two Reducers whose blocks overlap, with gradients in a different order on each rank.
TEST(NcclOrder, OverlappingReducersIssueInOneOrderOnEveryRank) {
  const LaunchOrderCounts counts;
  constexpr std::size_t kParameters = 6;
  const auto step = [](const std::string& prefix) {
    std::vector<ParameterSpec> specs;
    for (std::size_t p = 0; p < kParameters; ++p) {
      specs.push_back({.name = prefix + std::to_string(p), .shape = {700}});
    }
    return random_step(specs, 4, {Sync::kShard, Sync::kAll}, 11);
  };
  run_two_reducers(kSquare, {step("a"), step("b")}, [](const TwoReducers& two) {
    const auto r = static_cast<std::size_t>(two.rank);
    for (int repeat = 0; repeat < 3; ++repeat) {
      for (std::size_t m = 0; m < 2; ++m) {
        two.a.begin(m);
        two.b.begin(m);
        for (std::size_t p = 0; p < kParameters; ++p) {
          GpuRank& one = r % 2 == 0 ? two.a : two.b;
          GpuRank& other = r % 2 == 0 ? two.b : two.a;
          one.hand_over((p + r) % kParameters, m);
          other.hand_over(kParameters - 1 - p, m);
        }
        two.first.end_microbatch();
        two.second.end_microbatch();
      }
    }
  });
  // The library numbers communicators, and the ranks of a shard group share theirs. Names by first
  // use make the order comparable.
  std::vector<std::vector<std::string>> orders;
  for (int rank = 0; rank < 4; ++rank) {
    orders.push_back(groups_of(rank, names_by_use(rank, {"w", "x", "y", "z"})));
  }
  EXPECT_THAT(orders, ::testing::Each(orders[0]));
  EXPECT_GT(orders[0].size(), 60U);
}

// A block inside another one, and a block that ends before the other has got a gradient.
TEST(NcclOrder, BlocksMayNestAndEndInAnyOrder) {
  run_two_reducers({1, 2}, large_steps(2, 21), [](const TwoReducers& two) {
    for (const bool first_begins : {true, false}) {
      (first_begins ? two.a : two.b).begin(0);
      (first_begins ? two.b : two.a).begin(0);
      two.b.hand_over(0, 0);
      two.second.end_microbatch();
      two.a.hand_over(0, 0);
      two.first.end_microbatch();
    }
  });
}

// One rank reads the second Reducer's result before it hands anything to the first, whose buckets
// the other ranks have ready and would send first.
TEST(NcclOrder, ARankMayFinishWithOneReducerBeforeItBeginsWithAnother) {
  const LaunchOrderCounts counts;
  run_two_reducers({1, 3}, large_steps(3, 31), [](const TwoReducers& two) {
    for (int late = 0; late < 3; ++late) {  // the rank that does so
      two.a.begin(0);
      two.b.begin(0);
      if (two.rank != late) two.a.hand_over(0, 0);
      two.b.hand_over(0, 0);
      two.second.end_microbatch();
      if (two.rank == late) {
        static_cast<void>(two.b.read());
        two.a.hand_over(0, 0);
      }
      two.first.end_microbatch();
      static_cast<void>(two.b.read());
      static_cast<void>(two.a.read());
    }
  });
}

// A bucket without gradients on one rank is sent there at the end of the microbatch, long after the
// other ranks have it ready.
TEST(NcclOrder, ABucketThatIsAHoleOnOneRankHoldsUpNoOtherReducer) {
  StepCase holes =
      random_step({{.name = "unused", .shape = {1024}}, {.name = "used", .shape = {1024}}}, 2,
                  {Sync::kAll}, 41);
  holes.gradients[0][0][1].reset();
  const StepCase whole = large_steps(2, 42).second;
  run_two_reducers({1, 2}, {holes, whole, Missing::kZero}, [](const TwoReducers& two) {
    two.a.begin(0);
    two.b.begin(0);
    two.a.hand_over_all(0);
    two.b.hand_over(0, 0);
    two.second.end_microbatch();
    static_cast<void>(two.b.read());
    two.first.end_microbatch();
  });
}

// Steps of two Reducers, one inside the other, that ranks repeat without asking. Now and then one
// rank alone misses gradients in the outer one, or reads the inner one's result first.
TEST(NcclOrder, NestedReducersRepeatTheirOrder) {
  StepCase holes = random_step({{.name = "a", .shape = {1024}},
                                {.name = "b", .shape = {1024}},
                                {.name = "c", .shape = {1024}}},
                               2, {Sync::kAll}, 61);
  const TwoSteps steps{holes, large_steps(2, 62).second, Missing::kZero};
  std::mutex mutex;
  std::vector<std::int64_t> messages;
  run_two_reducers({1, 2}, steps, [&](const TwoReducers& two) {
    std::int64_t fewest = 1000;
    for (int step = 0; step < 40; ++step) {
      const std::int64_t before = two.first.stats().control_message_count;
      const bool is_odd = step < 30 && step % 5 == 4 && two.rank == step % 2;
      two.a.begin(0);
      two.b.begin(0);
      if (!is_odd) two.a.hand_over_all(0);
      two.b.hand_over(0, 0);
      two.second.end_microbatch();
      if (is_odd || step % 5 == 3) static_cast<void>(two.b.read());
      two.first.end_microbatch();
      static_cast<void>(two.first.found_inf());
      static_cast<void>(two.second.found_inf());
      if (step > 30) fewest = std::min(fewest, two.first.stats().control_message_count - before);
    }
    const std::lock_guard lock(mutex);
    messages.push_back(fewest);
  });
  EXPECT_THAT(messages, ::testing::Each(5)) << "2 words, 2 bits, who had gradients of the first";
}

// The ranks then have different tasks at the same places, and the status word still says what is
// wrong.
TEST(NcclOrder, RanksThatDisagreeAboutTheirSyncAreToldSo) {
  const TwoSteps steps = large_steps(2, 51);
  for (const int odd : {0, 1}) {
    run_nccl_mesh({1, 2}, [&](const Mesh& mesh) {
      StepCase own = steps.first;
      if (mesh.rank() == odd) own.schedule = {Sync::kNone};
      const auto disagree = [&] {
        Reducer first(mesh, {.bucket_bytes = kSmallBuckets});
        Reducer second(mesh, {.bucket_bytes = kSmallBuckets});
        GpuRank a(first, own, mesh);
        GpuRank b(second, steps.second, mesh);
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
