// One rank abandons a step, by leaving its scope or by calling abandon_step(): what every rank is
// told, and when. drop_test.cpp covers every moment at which that can happen.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::HasSubstr;

constexpr MeshShape kPair{1, 2};

StepCase abandoned_step(int world_size, std::vector<Sync> schedule) {
  std::vector<ParameterSpec> specs;
  for (int p = 0; p < 6; ++p) {
    specs.push_back({.name = "w" + std::to_string(p), .shape = {100 + p, 3}});
  }
  return random_step(std::move(specs), world_size, std::move(schedule), 5);
}

TEST(Abandon, ByABlockThatRaisesIsToldToTheOthers) {
  const StepCase step = abandoned_step(kSquare.size(), {Sync::kShard, Sync::kAll});
  expect_result(kSquare, step, {.bucket_bytes = 2 << 10}, [&](Reducer& reducer, const Mesh& mesh) {
    if (mesh.rank() == 1) {
      const auto raise = [&] {
        const Microbatch open(reducer, {.last = false});
        throw std::runtime_error("the block's own error");
      };
      EXPECT_THAT(caught<std::runtime_error>(raise), says("the block's own error"));
    } else {
      EXPECT_THAT(
          caught<StepAbortedError>([&] { run_step(reducer, step, mesh.rank()); }),
          names({1}, AllOf(HasSubstr("rank 1 of 4"), HasSubstr("its block raised an exception"))));
    }
    EXPECT_THROW(static_cast<void>(reducer.shard("w0")), UsageError);
    run_step(reducer, step, mesh.rank());
  });
}

TEST(Abandon, OutsideAMicrobatchDoesNothing) {
  const StepCase step = abandoned_step(2, {Sync::kShard, Sync::kAll});
  expect_result(kPair, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.abandon_step("nothing is open");
    run_step(reducer, step, mesh.rank());
    reducer.abandon_step("nothing is open");
  });
}

// A rank leaves its microbatch's scope without end(). Every rank is told, and later questions about
// the step say so too.
TEST(Abandon, ByAScopeWithoutEndIsSaidOnEveryRank) {
  const StepCase step = abandoned_step(2, {Sync::kAll});
  const ReducerOptions options{.bucket_bytes = 1 << 10};
  run_reducers(kPair, step, options, [&](Reducer& reducer, const Mesh& mesh) {
    const auto leave = [&] {
      std::vector<StoredGradient> stored;  // outlives the scope, as a caller's gradients do
      const Microbatch open(reducer, {.last = true});
      stored = deliver(reducer, step, 0, mesh.rank());
    };
    const std::string reason = "its scope was left without end()";
    const auto expect_no_result = [&](const std::string& got) {
      EXPECT_THAT(caught<UsageError>([&] { static_cast<void>(reducer.shard("w0")); }),
                  says("reducer: shard: expected a finished step, got " + got));
    };
    const auto expect_dropped_by = [&](int rank) {
      expect_no_result("one that was dropped by rank " + std::to_string(rank) + " of 2: " + reason +
                       "; begin a new step on every rank");
    };
    leave();  // on both ranks
    expect_dropped_by(mesh.rank());
    if (mesh.rank() == 1) {
      leave();
    } else {
      const auto run = [&] {
        run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
        reducer.finish();
      };
      EXPECT_THAT(caught<StepAbortedError>(run),
                  names({1}, HasSubstr("rank 1 of 2 in microbatch 0: " + reason)));
    }
    expect_dropped_by(1);
    run_step(reducer, step, mesh.rank());
    reducer.discard();
    expect_no_result("none; run the microbatches of a step first");
  });
}

// finish() has nothing left to complete, but the ranks have not agreed on the step yet.
TEST(AbandonUnread, FinishTells) {
  const StepCase step = abandoned_step(2, {Sync::kAll});
  run_reducers(kPair, step, {.bucket_bytes = 1 << 10}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.finish();
    if (mesh.rank() == 1) {
      reducer.begin_microbatch({.last = true});
      reducer.abandon_step("why not");
    } else {
      const auto run = [&] {
        run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
        reducer.finish();
      };
      EXPECT_THROW(run(), StepAbortedError);
    }
    reducer.finish();
  });
}

// Two meshes in one job: the text of an error counts ranks of the mesh, its ranks() are ranks of
// the job.
TEST(AbandonInOneOfTwoMeshes, NamesTheRankOfTheJob) {
  const StepCase step = abandoned_step(2, {Sync::kAll});
  run_ranks(4, [&](Communicator& world) {
    const int first = world.rank() / 2 * 2;
    const Mesh mesh(world, {.replicate = 1, .shard = 2, .ranks = {{first, first + 1}}});
    Reducer reducer(mesh, {.bucket_bytes = 1 << 10});
    register_all(reducer, step);
    const auto run = [&] {
      run_step(reducer, step, mesh.rank());
      reducer.finish();
    };
    if (first == 0) return run();
    if (world.rank() == 2) {
      EXPECT_THAT(caught<StepAbortedError>(run), names({3}, HasSubstr("rank 1 of 2")));
      return;
    }
    reducer.begin_microbatch({.last = true});
    reducer.abandon_step("why not");
  });
}

}  // namespace
}  // namespace hsdp
