// One rank's block raises: the step is dropped on all ranks, and all of them stay usable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <stdexcept>

#include "hsdp/error.h"
#include "tests/support/faulty_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

enum class When { kBeforeGradients, kHalfWay, kAfterGradients };

std::vector<ParameterSpec> parameters() {
  std::vector<ParameterSpec> specs;
  for (int p = 0; p < 6; ++p) {
    specs.push_back({.name = "w" + std::to_string(p), .shape = {100 + p, 3}});
  }
  return specs;
}

struct AbandonCase {
  MeshShape shape;
  std::vector<Sync> schedule;
  bool finish = false;
  int microbatch = 0;
  int bad_rank = 0;
  When when = When::kBeforeGradients;
};

void PrintTo(const AbandonCase& row, std::ostream* out) { *out << "rank " << row.bad_rank; }

// Every moment in every microbatch on 2x2; on the others the moments take turns.
std::vector<AbandonCase> every_case() {
  constexpr std::array<When, 3> kWhens{When::kBeforeGradients, When::kHalfWay,
                                       When::kAfterGradients};
  const std::vector<std::vector<Sync>> schedules{{Sync::kShard, Sync::kShard, Sync::kAll},
                                                 {Sync::kNone, Sync::kNone, Sync::kAll}};
  std::vector<AbandonCase> cases;
  for (const auto& schedule : schedules) {
    for (int m = 0; m < 3; ++m) {
      for (const When when : kWhens) cases.push_back({{2, 2}, schedule, false, m, m + 1, when});
    }
  }
  std::size_t turn = 0;
  for (const MeshShape shape : {MeshShape{1, 3}, MeshShape{3, 1}, MeshShape{1, 1}}) {
    for (const auto& schedule : schedules) {
      for (int m = 0; m < 3; ++m) {
        cases.push_back({shape, schedule, false, m, m % shape.size(), kWhens[turn++ % 3]});
      }
    }
    const int last_rank = shape.size() - 1;
    cases.push_back({shape, {Sync::kNone, Sync::kShard}, true, 1, last_rank, kWhens[turn++ % 3]});
    cases.push_back({shape, {Sync::kNone, Sync::kNone}, true, 0, 0, kWhens[turn++ % 3]});
  }
  return cases;
}

void throw_in_block(Reducer& reducer, const StepCase& step, int microbatch, int rank, When when) {
  std::vector<StoredGradient> stored;  // outlives the block, as a caller's gradients do
  Microbatch open(reducer, {.sync = step.schedule[static_cast<std::size_t>(microbatch)]});
  if (when == When::kAfterGradients) stored = deliver(reducer, step, microbatch, rank);
  if (when == When::kHalfWay) {
    for (std::size_t p = 0; p < step.parameters.size(); p += 2) {
      const Values& values =
          *step.gradients[p][static_cast<std::size_t>(microbatch)][static_cast<std::size_t>(rank)];
      stored.emplace_back(values, step.parameters[p].shape, step.parameters[p].dtype);
      reducer.gradient_ready(step.parameters[p].name, stored.back().view());
    }
  }
  throw std::runtime_error("the block's own error");
}

class Abandon : public testing::TestWithParam<AbandonCase> {};

TEST_P(Abandon, DropsTheStepEverywhereAndTheNextOneIsRight) {
  const AbandonCase& row = GetParam();
  FaultyStep faulty{.step = random_step(parameters(), row.shape.size(), row.schedule, 5),
                    .microbatch = row.microbatch,
                    .bad_ranks = {row.bad_rank}};
  faulty.step.finish = row.finish;
  faulty.fault = [&](Reducer& reducer, int rank) {
    throw_in_block(reducer, faulty.step, row.microbatch, rank, row.when);
  };
  const std::vector<FaultReport> reports =
      run_faulty_step(row.shape, {.bucket_bytes = 2 << 10}, faulty);
  expect_aborted(reports, faulty, "rank " + std::to_string(row.bad_rank));
  expect_aborted(reports, faulty, "its block raised an exception");
  EXPECT_EQ(reports[static_cast<std::size_t>(row.bad_rank)].text, "the block's own error");
}

std::string case_name(const testing::TestParamInfo<AbandonCase>& info) {
  std::string text = to_string(info.param.shape);
  for (const Sync sync : info.param.schedule) {
    text += sync == Sync::kNone ? "_none" : sync == Sync::kShard ? "_shard" : "_all";
  }
  return text + (info.param.finish ? "_finish" : "") + "_at_" +
         std::to_string(info.param.microbatch) + "_rank_" + std::to_string(info.param.bad_rank) +
         (info.param.when == When::kBeforeGradients ? "_before"
          : info.param.when == When::kHalfWay       ? "_half_way"
                                                    : "_after");
}

INSTANTIATE_TEST_SUITE_P(Cases, Abandon, testing::ValuesIn(every_case()), case_name);

TEST(AbandonTogether, TwoRanksAtOnce) {
  const MeshShape shape{.replicate = 2, .shard = 2};
  FaultyStep faulty{.step = random_step(parameters(), shape.size(), {Sync::kShard, Sync::kAll}, 5),
                    .microbatch = 0,
                    .bad_ranks = {1, 2}};
  faulty.fault = [&](Reducer& reducer, int rank) {
    throw_in_block(reducer, faulty.step, 0, rank, When::kBeforeGradients);
  };
  const auto reports = run_faulty_step(shape, {.bucket_bytes = 1 << 10}, faulty, 3);
  expect_aborted(reports, faulty);
  for (const int bad : {1, 2}) {
    EXPECT_EQ(reports[static_cast<std::size_t>(bad)].text, "the block's own error");
  }
}

TEST(AbandonTogether, EveryRankAtOnce) {
  const MeshShape shape{.replicate = 1, .shard = 3};
  FaultyStep faulty{.step = random_step(parameters(), shape.size(), {Sync::kShard, Sync::kAll}, 5),
                    .microbatch = 1,
                    .bad_ranks = {0, 1, 2}};
  faulty.fault = [&](Reducer& reducer, int rank) {
    throw_in_block(reducer, faulty.step, 1, rank, When::kAfterGradients);
  };
  for (const FaultReport& report : run_faulty_step(shape, {.bucket_bytes = 1 << 10}, faulty)) {
    EXPECT_EQ(report.text, "the block's own error");
  }
}

TEST(AbandonTogether, ManyTimesWithManyBuckets) {
  const MeshShape shape{.replicate = 2, .shard = 2};
  FaultyStep faulty{.step = random_step(odd_parameters(Dtype::kBf16), shape.size(),
                                        {Sync::kShard, Sync::kAll}, 5),
                    .microbatch = 1,
                    .bad_ranks = {3}};
  faulty.fault = [&](Reducer& reducer, int rank) {
    throw_in_block(reducer, faulty.step, 1, rank, When::kHalfWay);
  };
  const auto reports = run_faulty_step(shape, {.bucket_bytes = 1 << 10}, faulty, 20);
  expect_aborted(reports, faulty);
}

// Without the scope guard: abandon_step by name, and the reason travels.
TEST(AbandonByName, TheReasonReachesTheOthers) {
  const MeshShape shape{.replicate = 2, .shard = 2};
  FaultyStep faulty{.step = random_step(parameters(), shape.size(), {Sync::kAll}, 5),
                    .microbatch = 0,
                    .bad_ranks = {2}};
  faulty.fault = [](Reducer& reducer, int) {
    reducer.begin_microbatch({.sync = Sync::kAll});
    reducer.abandon_step("loss is nan");
    throw std::runtime_error("own");
  };
  const auto reports = run_faulty_step(shape, {}, faulty);
  expect_aborted(reports, faulty, "loss is nan");
}

TEST(AbandonByName, OutsideAMicrobatchDoesNothing) {
  const StepCase step = random_step(parameters(), 2, {Sync::kShard, Sync::kAll}, 5);
  std::vector<RankResult> results(2);
  run_mesh({1, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    register_all(reducer, step);
    reducer.abandon_step("nothing is open");
    results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
    reducer.abandon_step("nothing is open");
    static_cast<void>(reducer.shard("w0"));
  });
  expect_reference(results, step, {}, {1, 2}, "after no-op abandons");
}

// A rank leaves its microbatch's scope without end(): every rank is told so, also by what it asks
// of the step later.
TEST(AbandonWithoutEnd, IsSaidOnEveryRank) {
  const StepCase step = random_step(parameters(), 2, {Sync::kAll}, 5);
  std::vector<RankResult> results(2);
  run_mesh({1, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 1 << 10});
    register_all(reducer, step);
    const auto leave = [&] {
      std::vector<StoredGradient> stored;  // outlives the scope, as a caller's gradients do
      const Microbatch open(reducer, {.last = true});
      stored = deliver(reducer, step, 0, mesh.rank());
    };
    const auto no_result = [&] {
      const auto error = caught<UsageError>([&] { static_cast<void>(reducer.shard("w0")); });
      return error ? std::string(error->what()) : "a result";
    };
    const std::string reason = "its scope was left without end()";
    const std::string expected = "reducer: shard: expected a finished step, got ";
    leave();  // on both
    EXPECT_EQ(no_result(), expected + "one that was dropped by rank " +
                               std::to_string(mesh.rank()) + " of 2: " + reason +
                               "; begin a new step on every rank");
    if (mesh.rank() == 1) {
      leave();
    } else {
      const auto error = caught<StepAbortedError>([&] {
        run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
        reducer.finish();
      });
      ASSERT_TRUE(error);
      EXPECT_THAT(error->what(), testing::HasSubstr("rank 1 of 2 in microbatch 0: " + reason));
    }
    EXPECT_EQ(no_result(), expected + "one that was dropped by rank 1 of 2: " + reason +
                               "; begin a new step on every rank");
    results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
    reducer.discard();
    EXPECT_EQ(no_result(), expected + "none; run the microbatches of a step first");
  });
  expect_reference(results, step, {}, {1, 2}, "after scopes without end()");
}

// finish() has nothing to complete, but the step has not been agreed on.
TEST(AbandonUnread, FinishTells) {
  const StepCase step = random_step(parameters(), 2, {Sync::kAll}, 5);
  run_mesh({1, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 1 << 10});
    register_all(reducer, step);
    reducer.finish();
    if (mesh.rank() == 1) {
      reducer.begin_microbatch({.last = true});
      reducer.abandon_step("why not");
      reducer.finish();
    } else {
      EXPECT_TRUE(caught<StepAbortedError>([&] {
        run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
        reducer.finish();
      }));
      reducer.finish();
    }
  });
}

// The others never read the dropped step: whatever they call next tells them, once, and what they
// began meanwhile is dropped with it.
TEST(AbandonUnread, TheOthersLearnFromTheirNextCalls) {
  const StepCase step = random_step(parameters(), 2, {Sync::kShard, Sync::kAll}, 5);
  std::vector<RankResult> results(2);
  for (int repeat = 0; repeat < 10; ++repeat) {
    run_mesh({1, 2}, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.bucket_bytes = 1 << 10});
      register_all(reducer, step);
      if (mesh.rank() == 1) {
        reducer.begin_microbatch({.last = true});
        reducer.abandon_step("why not");
      } else {
        const auto error = caught<StepAbortedError>([&] {
          run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
          run_step(reducer, step, mesh.rank());
        });
        ASSERT_TRUE(error);
        EXPECT_EQ(error->ranks(), std::vector<int>{1});
      }
      results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
    });
    expect_reference(results, step, {}, {1, 2}, "after an unread drop");
  }
}

// Two meshes in one job: an error's text counts ranks of the mesh, its ranks() those of the job.
TEST(AbandonInOneOfTwoMeshes, NamesTheRankOfTheJob) {
  const StepCase step = random_step(parameters(), 2, {Sync::kAll}, 5);
  run_ranks(4, [&](Communicator& world) {
    const Mesh mesh(world, {.replicate = 1,
                            .shard = 2,
                            .ranks = world.rank() < 2 ? std::vector<std::vector<int>>{{0, 1}}
                                                      : std::vector<std::vector<int>>{{2, 3}}});
    Reducer reducer(mesh, {.bucket_bytes = 1 << 10});
    register_all(reducer, step);
    if (world.rank() == 3) {
      reducer.begin_microbatch({.last = true});
      reducer.abandon_step("why not");
      return;
    }
    const auto run = [&] {
      run_step(reducer, step, mesh.rank());
      reducer.finish();
    };
    if (world.rank() < 2) return run();
    const auto error = caught<StepAbortedError>(run);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->ranks(), std::vector<int>{3});
    EXPECT_NE(std::string(error->what()).find("rank 1 of 2"), std::string::npos) << error->what();
  });
}

}  // namespace
}  // namespace hsdp
