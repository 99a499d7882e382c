// One rank cannot make what a Reducer needs: then no rank has it, all ranks are told at once which
// one failed, and the next attempt succeeds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/reducer_internal.h"
#include "tests/support/failed_set_up.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::HasSubstr;

TEST(SetUpOfTwo, GivesEachItsOwnError) {
  run_patiently(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {100}});
    const bool bad = mesh.rank() == 0 || mesh.rank() == 2;  // of one replicate group
    if (bad) fail_call(FailingCall::kMemfdCreate, 0);
    const auto error = caught<Error>([&] { reducer.begin_microbatch(); });
    ASSERT_TRUE(error);
    const std::string own = "(rank " + std::to_string(mesh.rank()) + " of 4)";
    EXPECT_THAT(error->what(), HasSubstr(bad ? own : "rank 0 of 4 could not"));
    EXPECT_EQ(call_has_failed(), bad);
  });
}

TEST(SetUpOfALane, IsAgreedAndMayBeTriedAgain) {
  const std::vector<SetUpFault> faults{
      {"make the group of lane 'gather'", FailingCall::kMemfdCreate, 0},
      {"start lane 'gather'", FailingCall::kPthreadCreate, 0},
  };
  const StepCase step =
      random_step({{.name = "w", .shape = {100}}}, kSquare.size(), {Sync::kAll}, 7);
  run_reducers(
      kSquare, step, {.bucket_bytes = 256},
      [&](Reducer& reducer, const Mesh& mesh) {
        for (int bad = 0; bad < 4; ++bad) {
          const SetUpFault& fault = faults[static_cast<std::size_t>(bad) % faults.size()];
          const auto make = [&] {
            static_cast<void>(ReducerInternal(reducer).make_lane("gather"));
          };
          if (mesh.rank() == bad) {
            fail_call(fault.call, fault.skipped);
            EXPECT_THROW(make(), Error);
            EXPECT_TRUE(call_has_failed());
          } else {
            EXPECT_THAT(caught<StepAbortedError>(make),
                        names({bad}, AllOf(HasSubstr(fault.part), HasSubstr("try again"))));
          }
          run_step(reducer, step, mesh.rank());
        }
        const std::unique_ptr<GatherLane> lane = ReducerInternal(reducer).make_lane("gather");
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

// The end of the world is repeated like any other failure.
TEST(SetUpInAnEndedWorld, SaysSoEveryTime) {
  std::latch made(2);
  std::latch ended(2);
  run_patiently({1, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {100}});
    made.arrive_and_wait();
    if (mesh.rank() == 0) Communicator(mesh.world()).abort("the test wants it");
    ended.arrive_and_wait();
    EXPECT_THROW(reducer.begin_microbatch(), RankError);
    EXPECT_THROW(reducer.finish(), RankError);
    EXPECT_THROW(static_cast<void>(reducer.shard("w")), RankError);
  });
}

// The memory of local sums is not part of the set-up: the first `none` allocates it.
TEST(MemoryOfLocalSums, ThatOneRankCannotGetDropsTheStep) {
  const StepCase step =
      random_step({{.name = "w0", .shape = {100}}}, kSquare.size(), {Sync::kNone, Sync::kAll}, 3);
  for (const bool late : {false, true}) {  // late: after a microbatch that needs none
    const auto run = [&](Reducer& reducer, const Mesh& mesh) {
      run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kAll});  // sets it up
      const auto run_out = [&] {
        if (late) run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kShard});
        if (mesh.rank() == 1) fail_call(FailingCall::kMadvise, 0);
        run_schedule(reducer, step, mesh.rank());
        reducer.finish();
      };
      if (mesh.rank() == 1) {
        EXPECT_THAT(caught<Error>(run_out), says(HasSubstr("host memory")));
        EXPECT_TRUE(call_has_failed());
      } else {
        EXPECT_THAT(caught<StepAbortedError>(run_out), names({1}, HasSubstr("host memory")));
      }
      run_step(reducer, step, mesh.rank());
      EXPECT_EQ(reducer.state().step, 2);
    };
    expect_result(kSquare, step, {}, run, kPatient);
  }
}

}  // namespace
}  // namespace hsdp
