// One rank cannot make what a Reducer needs: no rank has it then, everybody is told at once who
// failed, and the next attempt is right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/failed_set_up.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::HasSubstr;

struct Case {
  MeshShape shape;
  TransportChoice transport;
};

void PrintTo(const Case& row, std::ostream* out) { *out << to_string(row.shape); }

class SetUp : public testing::TestWithParam<Case> {};

TEST_P(SetUp, FailsOnAllRanksAndMayBeTriedAgain) {
  const MeshShape shape = GetParam().shape;
  const StepCase step =
      random_step({{.name = "w0", .shape = {100}}, {.name = "w1", .shape = {9, 7}}}, shape.size(),
                  {Sync::kShard, Sync::kAll}, 3);
  std::vector<RankResult> results(static_cast<std::size_t>(shape.size()));
  ThreadRanksOptions options = kPatient;
  options.transport = GetParam().transport;
  const auto run = [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 256, .replica_hop = std::make_shared<MemoryHop>()});
    register_all(reducer, step);
    int attempts = 0;
    for (const SetUpFault& fault : set_up_faults()) {
      expect_failed_set_up(reducer, mesh, fault, attempts++ % shape.size());
    }
    results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
  };
  run_mesh(shape, run, options);
  expect_reference(results, step, {}, shape, "after every failure");
}

INSTANTIATE_TEST_SUITE_P(Meshes, SetUp,
                         testing::Values(Case{{.replicate = 2, .shard = 2}, TransportChoice::kAuto},
                                         Case{{.replicate = 2, .shard = 2}, TransportChoice::kTcp},
                                         Case{{.replicate = 3, .shard = 2}, TransportChoice::kAuto},
                                         Case{{.replicate = 3, .shard = 2}, TransportChoice::kTcp}),
                         [](const auto& chosen) {
                           return to_string(chosen.param.shape) +
                                  (chosen.param.transport == TransportChoice::kTcp
                                       ? "Tcp"
                                       : "SharedMemory");
                         });

TEST(SetUpOfRegistrations, MayBeMendedAndTriedAgain) {
  const StepCase step =
      random_step({{.name = "w0", .shape = {100}}, {.name = "w1", .shape = {9, 7}}}, kSquare.size(),
                  {Sync::kAll}, 4);
  std::vector<RankResult> results(4);
  run_mesh(
      kSquare,
      [&](const Mesh& mesh) {
        Reducer reducer(mesh);
        reducer.register_parameter(step.parameters[0]);
        if (mesh.rank() != 2) reducer.register_parameter(step.parameters[1]);
        const auto error = caught<MismatchError>([&] { reducer.begin_microbatch(); });
        ASSERT_TRUE(error);
        EXPECT_EQ(error->ranks(), std::vector<int>{2});
        EXPECT_THAT(error->what(), AllOf(HasSubstr("parameter 1"), HasSubstr("'w1'"),
                                         HasSubstr("nothing more on rank 2 of 4")));
        if (mesh.rank() == 2) reducer.register_parameter(step.parameters[1]);
        results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
      },
      kPatient);
  expect_reference(results, step, {}, kSquare, "after the missing registration");
}

TEST(SetUpOfTwo, GivesEachItsOwnError) {
  run_mesh(
      kSquare,
      [&](const Mesh& mesh) {
        Reducer reducer(mesh);
        reducer.register_parameter({.name = "w", .shape = {100}});
        const bool bad = mesh.rank() == 0 || mesh.rank() == 2;  // of one replicate group
        if (bad) fail_call(FailingCall::kMemfdCreate, 0);
        const auto error = caught<Error>([&] { reducer.begin_microbatch(); });
        ASSERT_TRUE(error);
        const std::string own = "(rank " + std::to_string(mesh.rank()) + " of 4)";
        EXPECT_THAT(error->what(), HasSubstr(bad ? own : "rank 0 of 4 could not"));
        EXPECT_EQ(call_has_failed(), bad);
      },
      kPatient);
}

TEST(SetUpOfGroups, IsAgreedAndLeavesTheMeshToAnotherReducer) {
  run_mesh(
      kSquare,
      [&](const Mesh& mesh) {
        for (int skipped = 0; skipped < 2; ++skipped) {
          if (mesh.rank() == 1) fail_call(FailingCall::kMemfdCreate, skipped);
          const auto error = caught<Error>([&] { Reducer(mesh, {}); });
          EXPECT_EQ(call_has_failed(), mesh.rank() == 1);
          EXPECT_TRUE(error);
        }
        Reducer reducer(mesh);
      },
      kPatient);
}

TEST(SetUpOfALane, IsAgreedAndMayBeTriedAgain) {
  const std::vector<SetUpFault> faults{
      {"make the group of lane 'gather'", FailingCall::kMemfdCreate, 0},
      {"start lane 'gather'", FailingCall::kPthreadCreate, 0},
  };
  const StepCase step =
      random_step({{.name = "w", .shape = {100}}}, kSquare.size(), {Sync::kAll}, 7);
  run_mesh(
      kSquare,
      [&](const Mesh& mesh) {
        Reducer reducer(mesh, {.bucket_bytes = 256});
        register_all(reducer, step);
        for (int bad = 0; bad < 4; ++bad) {
          const SetUpFault& fault = faults[static_cast<std::size_t>(bad) % faults.size()];
          const auto make = [&] { static_cast<void>(reducer.make_lane("gather")); };
          if (mesh.rank() == bad) {
            fail_call(fault.call, fault.skipped);
            EXPECT_TRUE(caught<Error>(make));
            EXPECT_TRUE(call_has_failed());
          } else {
            const auto error = caught<StepAbortedError>(make);
            ASSERT_TRUE(error);
            EXPECT_EQ(error->ranks(), std::vector<int>{bad});
            EXPECT_THAT(error->what(), AllOf(HasSubstr(fault.part), HasSubstr("try again")));
          }
          run_step(reducer, step, mesh.rank());
        }
        const std::unique_ptr<GatherLane> lane = reducer.make_lane("gather");
        Values ranks(2, static_cast<float>(mesh.rank()));
        const TensorView whole{ranks.data(), 2, Dtype::kF32, {}};
        const Event gathered = lane->run({}, [&](Communicator& shard_group, Stream& stream) {
          shard_group.all_gather(whole.slice(shard_group.rank(), 1), whole, stream);
        });
        gathered.wait();
        const auto first = static_cast<float>(2 * mesh.replica());
        EXPECT_EQ(ranks, (Values{first, first + 1}));
      },
      kPatient);
}

// The world's end is repeated, as any other failure is.
TEST(SetUpInAnEndedWorld, SaysSoEveryTime) {
  std::latch made(2);
  std::latch ended(2);
  run_mesh(
      {1, 2},
      [&](const Mesh& mesh) {
        Reducer reducer(mesh);
        reducer.register_parameter({.name = "w", .shape = {100}});
        made.arrive_and_wait();
        if (mesh.rank() == 0) Communicator(mesh.world()).abort("the test wants it");
        ended.arrive_and_wait();
        EXPECT_TRUE(caught<RankError>([&] { reducer.begin_microbatch(); }));
        EXPECT_TRUE(caught<RankError>([&] { reducer.finish(); }));
        EXPECT_TRUE(caught<RankError>([&] { static_cast<void>(reducer.shard("w")); }));
      },
      kPatient);
}

// A hop that fails on one rank, as for want of memory.
class BrokenHop final : public ReplicaHop {
 public:
  explicit BrokenHop(bool breaks) : breaks_(breaks) {}
  void bind(Communicator scatter, Communicator gather) override {
    plain_.bind(std::move(scatter), std::move(gather));
  }
  Event reduce(const HopBucket& bucket, Stream& stream) override {
    if (breaks_) throw Error("hop: no memory for codes");
    return plain_.reduce(bucket, stream);
  }
  [[nodiscard]] std::string describe() const override { return "broken"; }

 private:
  bool breaks_;
  PlainHop plain_;
};

TEST(HopFailure, ReachesTheOthersAtOnceWithItsText) {
  const StepCase step =
      random_step({{.name = "w", .shape = {100}}}, kSquare.size(), {Sync::kAll}, 6);
  run_mesh(
      kSquare,
      [&](const Mesh& mesh) {
        const bool bad = mesh.rank() == 3;
        Reducer reducer(mesh, {.replica_hop = std::make_shared<BrokenHop>(bad)});
        register_all(reducer, step);
        const auto run = [&] { run_step(reducer, step, mesh.rank()); };
        for (const auto& call : std::vector<std::function<void()>>{run, run}) {
          const auto error = caught<Error>(call);
          ASSERT_TRUE(error);
          EXPECT_THAT(error->what(), HasSubstr("hop: no memory for codes"));
        }
        if (!bad) {
          const auto error = caught<RankError>(run);
          ASSERT_TRUE(error);
          EXPECT_EQ(error->ranks(), std::vector<int>{3});
        }
        reducer.close();
      },
      kPatient);
}

TEST(SetUpOfOptions, LeavesTheMeshToAnotherReducer) {
  const StepCase step =
      random_step({{.name = "w0", .shape = {100}}}, kSquare.size(), {Sync::kAll}, 5);
  std::vector<RankResult> results(4);
  run_mesh(
      kSquare,
      [&](const Mesh& mesh) {
        const std::int64_t bucket_bytes = mesh.rank() == 1 ? -1 : 256;
        if (mesh.rank() == 1) {
          EXPECT_TRUE(caught<UsageError>([&] { Reducer(mesh, {.bucket_bytes = bucket_bytes}); }));
        } else {
          EXPECT_TRUE(
              caught<StepAbortedError>([&] { Reducer(mesh, {.bucket_bytes = bucket_bytes}); }));
        }
        Reducer reducer(mesh, {.bucket_bytes = 256});
        register_all(reducer, step);
        results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
      },
      kPatient);
  expect_reference(results, step, {}, kSquare, "after refused options");
}

// Not part of the set-up: the memory of local sums, which the first `none` asks for.
TEST(MemoryOfLocalSums, ThatOneRankCannotGetDropsTheStep) {
  const StepCase step =
      random_step({{.name = "w0", .shape = {100}}}, kSquare.size(), {Sync::kNone, Sync::kAll}, 3);
  for (const bool late : {false, true}) {  // after a microbatch that needs none
    std::vector<RankResult> results(4);
    run_mesh(
        kSquare,
        [&](const Mesh& mesh) {
          Reducer reducer(mesh);
          register_all(reducer, step);
          run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kAll});  // sets it up
          const auto run = [&] {
            if (late) run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kShard});
            if (mesh.rank() == 1) fail_call(FailingCall::kMadvise, 0);
            run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kNone});
            run_microbatch(reducer, step, 1, mesh.rank(), {.sync = Sync::kAll});
            reducer.finish();
          };
          if (mesh.rank() == 1) {
            const auto error = caught<Error>(run);
            EXPECT_TRUE(call_has_failed());
            ASSERT_TRUE(error);
            EXPECT_THAT(error->what(), HasSubstr("host memory"));
          } else {
            const auto error = caught<StepAbortedError>(run);
            ASSERT_TRUE(error);
            EXPECT_EQ(error->ranks(), std::vector<int>{1});
            EXPECT_THAT(error->what(), HasSubstr("host memory"));
          }
          results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
          EXPECT_EQ(reducer.state().step, 2);
        },
        kPatient);
    expect_reference(results, step, {}, kSquare, "after memory that was not there");
  }
}

}  // namespace
}  // namespace hsdp
