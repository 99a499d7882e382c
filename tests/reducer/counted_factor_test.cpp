// Divide factors that the ranks count: tokens, batches, microbatches.
#include <gtest/gtest.h>

#include <functional>

#include "hsdp/error.h"
#include "tests/support/faulty_step.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

std::int64_t tokens_of(int rank, int microbatch) { return 3 + 5 * rank + 7 * microbatch; }

std::int64_t tokens_of_all(int first_rank, int rank_count, int microbatch_count) {
  std::int64_t count = 0;
  for (int rank = first_rank; rank < first_rank + rank_count; ++rank) {
    for (int m = 0; m < microbatch_count; ++m) count += tokens_of(rank, m);
  }
  return count;
}

std::vector<ParameterSpec> some_parameters(Dtype dtype) {
  return {{.name = "w", .shape = {501}, .dtype = dtype},
          {.name = "v", .shape = {33, 7}, .dtype = dtype},
          {.name = "s", .shape = {}, .dtype = dtype}};
}

using CountedBody = std::function<void(Reducer&, const Mesh&)>;

std::vector<RankResult> count_and_read(MeshShape shape, const StepCase& step,
                                       const ReducerOptions& options, const CountedBody& body) {
  std::vector<RankResult> results(static_cast<std::size_t>(shape.size()));
  run_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    register_all(reducer, step);
    body(reducer, mesh);
    results[static_cast<std::size_t>(mesh.rank())] = read_result(reducer, step);
  });
  return results;
}

// Twice, so that nothing of a step counts in the next one.
void run_with_tokens(Reducer& reducer, const StepCase& step, int rank) {
  for (int round = 0; round < 2; ++round) {
    for (int m = 0; m < static_cast<int>(step.schedule.size()); ++m) {
      reducer.divide_by_tokens(tokens_of(rank, m));
      run_microbatch(reducer, step, m, rank, {.sync = step.schedule[static_cast<std::size_t>(m)]});
    }
    reducer.finish();
  }
}

TEST(CountedTokens, DivideAsAFactorOfTheirSumDoes) {
  for (const MeshShape shape : {kSquare, MeshShape{1, 3}, MeshShape{3, 1}, MeshShape{1, 1}}) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const std::vector<Sync>& schedule : {std::vector<Sync>{Sync::kAll},
                                                {Sync::kNone, Sync::kShard, Sync::kAll},
                                                {Sync::kShard, Sync::kNone},
                                                {Sync::kNone}}) {
        StepCase step = random_step(some_parameters(dtype), shape.size(), schedule, 7);
        step.finish = schedule.back() != Sync::kAll;
        step.loss_scale = 64.0;
        const int count = static_cast<int>(schedule.size());
        step.divide_factor = static_cast<double>(tokens_of_all(0, shape.size(), count));
        const auto results =
            count_and_read(shape, step, {.bucket_bytes = 256}, [&](Reducer& r, const Mesh& m) {
              r.set_loss_scale(step.loss_scale);
              run_with_tokens(r, step, m.rank());
            });
        expect_reference(results, step, {.bucket_bytes = 256}, shape, "tokens");
      }
    }
  }
}

TEST(CountedTokens, NoneAtAllGiveZeros) {
  StepCase step = integer_step({{.name = "w", .shape = {40}}}, 4, 1, 5);
  for (auto& gradient : step.gradients[0][0]) gradient->assign(gradient->size(), 0.0F);
  count_and_read(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.divide_by_tokens(0);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
    const Values shard = values_of(reducer.shard("w"));
    EXPECT_EQ(shard, Values(shard.size(), 0.0F));
  });
}

TEST(CountedTokens, AreAskedForBeforeEachMicrobatch) {
  const StepCase step = integer_step({{.name = "w", .shape = {40}}}, 4, 2, 5);
  count_and_read(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.divide_by_tokens(3);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    EXPECT_TRUE(caught<UsageError>([&] { reducer.begin_microbatch({.last = true}); }));
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});  // the step was dropped
    EXPECT_TRUE(caught<UsageError>([&] { reducer.divide_by_tokens(3); }));
    run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
    EXPECT_TRUE(caught<UsageError>([&] { reducer.divide_by_tokens(-1); }));
    reducer.set_gradient_divide_factor(2.0);
    EXPECT_TRUE(caught<UsageError>([&] { reducer.divide_by_tokens(3); }));
    reducer.set_gradient_divide_factor(std::nullopt);
    reducer.divide_by_tokens(3);
    EXPECT_TRUE(caught<UsageError>([&] { reducer.set_gradient_divide_factor(2.0); }));
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
  });
}

TEST(CountedTokens, OnSomeRanksOnlyAreAMismatch) {
  const StepCase step = integer_step({{.name = "w", .shape = {40}}}, 4, 1, 5);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    register_all(reducer, step);
    if (mesh.rank() == 3) reducer.divide_by_tokens(3);
    EXPECT_TRUE(caught<MismatchError>([&] {
      run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
      static_cast<void>(reducer.shard("w"));
    }));
  });
}

// Rank 3 has no batch in the last of two microbatches: seven in all.
TEST(CountedBatches, AreWhatRanksHad) {
  for (const auto& [divide_by, factor] :
       {std::pair{DivideBy::kRanks, 3.5}, {DivideBy::kRanksMicrobatches, 7.0}}) {
    StepCase step = random_step(some_parameters(Dtype::kBf16), 4, {Sync::kShard, Sync::kAll}, 7);
    for (auto& gradients : step.gradients) gradients[1][3].reset();
    step.divide_factor = factor;
    const ReducerOptions options{.bucket_bytes = 256, .divide_by = divide_by};
    const auto results =
        count_and_read(kSquare, step, options, [&](Reducer& reducer, const Mesh& mesh) {
          for (int m = 0; m < 2; ++m) {
            const bool has_batch = m == 0 || mesh.rank() != 3;
            run_microbatch(reducer, step, m, mesh.rank(), {.last = m == 1, .has_batch = has_batch});
          }
        });
    expect_reference(results, step, {.missing = Missing::kZero}, kSquare, "batches");
  }
}

TEST(CountedBatches, GradientsWithoutABatchDropTheStep) {
  const StepCase step = integer_step({{.name = "w", .shape = {40}}}, 4, 1, 5);
  count_and_read(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    const auto fault = [&] {
      run_microbatch(reducer, step, 0, mesh.rank(), {.last = true, .has_batch = mesh.rank() != 1});
      static_cast<void>(reducer.shard("w"));
    };
    if (mesh.rank() == 1) {
      EXPECT_TRUE(caught<UsageError>(fault));
    } else {
      EXPECT_TRUE(caught<StepAbortedError>(fault));
    }
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
  });
}

TEST(CountedMicrobatches, MakeTheMeanOverThemToo) {
  StepCase step =
      random_step(some_parameters(Dtype::kF16), 4, {Sync::kShard, Sync::kNone, Sync::kAll}, 7);
  step.divide_factor = 12.0;
  const ReducerOptions options{.divide_by = DivideBy::kRanksMicrobatches};
  const auto results =
      count_and_read(kSquare, step, options, [&](Reducer& reducer, const Mesh& mesh) {
        for (int m = 0; m < 3; ++m) {
          run_microbatch(reducer, step, m, mesh.rank(),
                         {.sync = step.schedule[static_cast<std::size_t>(m)]});
        }
      });
  expect_reference(results, step, {}, kSquare, "microbatches");
}

// Ranks 0 and 1 have one backward pass in the window, 2 and 3 have two.
TEST(CountedMicrobatches, ArePassesInAWindow) {
  const StepCase step = integer_step({{.name = "w", .shape = {40}}}, 4, 2, 5);
  const auto window = [&](Reducer& reducer, const Mesh& mesh) {
    reducer.begin_window({.last = true});
    const int passes = mesh.rank() < 2 ? 1 : 2;
    for (int m = 0; m < passes; ++m) run_microbatch(reducer, step, m, mesh.rank(), {});
    reducer.end_window();
  };
  const auto counted =
      count_and_read(kSquare, step, {.divide_by = DivideBy::kRanksMicrobatches}, window);
  const auto set = count_and_read(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.set_gradient_divide_factor(6.0);
    window(reducer, mesh);
  });
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(counted[rank].shards, set[rank].shards);
  }
}

}  // namespace
}  // namespace hsdp
