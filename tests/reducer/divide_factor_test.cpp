// Rule 1 through the Reducer: what partials and results are divided by, set or counted (tokens,
// batches, microbatches), and when that is decided.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AnyOf;
using testing::HasSubstr;

StepCase two_microbatches(Dtype dtype, int world_size) {
  return integer_step({{.name = "w", .shape = {40}, .dtype = dtype}}, world_size, 2, 5);
}

void run_both(Reducer& reducer, const StepCase& step, int rank) {
  for (int m = 0; m < 2; ++m) run_microbatch(reducer, step, m, rank, {.last = m == 1});
}

// This rank's slice of the sum over the first microbatches, divided: over its shard group, or over
// all ranks.
struct Own {
  Reducer& reducer;
  const Mesh& mesh;
  const StepCase& step;

  [[nodiscard]] Values partial(int microbatch_count, float divisor) const {
    const int shard = mesh.shard_size();
    return divided(mesh.replica() * shard, shard, microbatch_count, divisor);
  }
  [[nodiscard]] Values result(float divisor) const { return divided(0, mesh.size(), 2, divisor); }

 private:
  [[nodiscard]] Values divided(int first, int count, int microbatch_count, float divisor) const {
    const Slice slice = reducer.slice("w");
    Values sum(static_cast<std::size_t>(slice.count), 0.0F);
    for (int m = 0; m < microbatch_count; ++m) {
      for (int rank = first; rank < first + count; ++rank) {
        const Values& g =
            *step.gradients[0][static_cast<std::size_t>(m)][static_cast<std::size_t>(rank)];
        for (std::size_t i = 0; i < sum.size(); ++i) {
          sum[i] += g[static_cast<std::size_t>(slice.offset) + i];
        }
      }
    }
    for (float& value : sum) value /= divisor;
    return sum;
  }
};

class DefaultFactor : public testing::TestWithParam<MeshShape> {};

// After one microbatch the partial is the mean over the shard group; at the end the result is the
// mean over the world. A group of one contributes a factor of one.
TEST_P(DefaultFactor, IsTheNumberOfRanks) {
  const MeshShape shape = GetParam();
  for (const Dtype dtype : kDtypes) {
    const StepCase step = two_microbatches(dtype, shape.size());
    run_reducers(shape, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
      const Own own{reducer, mesh, step};
      run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
      EXPECT_EQ(reducer.partial_shard("w"), own.partial(1, static_cast<float>(shape.shard)));
      run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
      EXPECT_EQ(values_of(reducer.shard("w")), own.result(static_cast<float>(shape.size())));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, DefaultFactor,
                         testing::Values(MeshShape{4, 8}, MeshShape{1, 3}, MeshShape{2, 3},
                                         MeshShape{1, 5}, MeshShape{2, 5}, MeshShape{1, 6},
                                         MeshShape{2, 6}, MeshShape{1, 7}, MeshShape{2, 7},
                                         MeshShape{1, 1}, MeshShape{3, 1}),
                         testing::PrintToStringParamName());

TEST(ExplicitFactor, MayBeSetUntilTheLastMicrobatchBeginsAndPersists) {
  const StepCase step = two_microbatches(Dtype::kBf16, kSquare.size());
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    const Own own{reducer, mesh, step};
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    reducer.set_gradient_divide_factor(7.0);  // with token-weighted losses the count is known late
    EXPECT_EQ(reducer.partial_shard("w"), own.partial(1, 7.0F));
    run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
    EXPECT_EQ(values_of(reducer.shard("w")), own.result(7.0F));
    run_both(reducer, step, mesh.rank());
    EXPECT_EQ(values_of(reducer.shard("w")), own.result(7.0F)) << "persists";
    reducer.set_gradient_divide_factor(std::nullopt);
    run_both(reducer, step, mesh.rank());
    EXPECT_EQ(values_of(reducer.shard("w")), own.result(4.0F)) << "default again";
  });
}

TEST(ExplicitFactor, SetBeforeFinishDividesItsResult) {
  const StepCase step = two_microbatches(Dtype::kF32, kSquare.size());
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    for (int m = 0; m < 2; ++m) run_microbatch(reducer, step, m, mesh.rank(), {.last = false});
    reducer.set_gradient_divide_factor(0.1);
    reducer.finish();
    const Own own{reducer, mesh, step};
    EXPECT_EQ(values_of(reducer.shard("w")), own.result(static_cast<float>(0.1)));
  });
}

TEST(ExplicitFactor, LossScaleDividesPartialsToo) {
  const StepCase step = two_microbatches(Dtype::kF32, kSquare.size());
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.set_loss_scale(1024.0);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    const Own own{reducer, mesh, step};
    EXPECT_EQ(reducer.partial_shard("w"), own.partial(1, 2048.0F));
    reducer.discard();
  });
}

TEST(ExplicitFactor, IsRefusedInsideAMicrobatch) {
  const StepCase step = two_microbatches(Dtype::kF32, kSquare.size());
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.begin_microbatch({.last = false});
    EXPECT_THROW(reducer.set_gradient_divide_factor(2.0), UsageError);
    EXPECT_THROW(reducer.set_loss_scale(2.0), UsageError);
    const auto stored = deliver(reducer, step, 0, mesh.rank());
    reducer.end_microbatch();
    EXPECT_THROW(reducer.set_loss_scale(2.0), UsageError) << "a step is pending";
    run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
    const Own own{reducer, mesh, step};
    EXPECT_EQ(values_of(reducer.shard("w")), own.result(4.0F));
    reducer.set_loss_scale(2.0);
  });
}

// A factor outside the range of fp32 would silently make every value zero or infinite.
TEST(ExplicitFactor, IsRefusedWhenItCannotDivide) {
  run_mesh({}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    for (const double bad : {0.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
      EXPECT_THROW(reducer.set_gradient_divide_factor(bad), UsageError) << bad;
      EXPECT_THROW(reducer.set_loss_scale(bad), UsageError) << bad;
    }
    for (const double bad : {1e300, 1e39, 1e-300, 1e-45}) {
      EXPECT_THROW(reducer.set_gradient_divide_factor(bad), UsageError) << bad;
    }
    reducer.set_gradient_divide_factor(1e30);
    EXPECT_THROW(reducer.set_loss_scale(1e30), UsageError);
    reducer.set_loss_scale(65536);
    EXPECT_THROW(reducer.set_gradient_divide_factor(1e34), UsageError);
  });
}

TEST(DivideFactor, ThatDiffersBetweenRanksIsAMismatchOnAllRanks) {
  using testing::Matcher;
  struct Row {
    std::function<void(Reducer& reducer, bool odd)> set;
    Matcher<std::string> message;
  };
  const std::vector<Row> rows{
      {[](Reducer& r, bool odd) { r.set_gradient_divide_factor(odd ? 5.0 : 4.0); },
       HasSubstr("factor")},
      // The status words name it, or the replica hop if that comes first.
      {[](Reducer& r, bool odd) { r.set_loss_scale(odd ? 8.0 : 4.0); },
       AnyOf(HasSubstr("loss scale"), HasSubstr("divisor"))},
      {[](Reducer& r, bool odd) {
         if (odd) r.divide_by_tokens(3);
       },
       testing::_}};
  const StepCase step = two_microbatches(Dtype::kF32, kSquare.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
      SCOPED_TRACE(i);
      rows[i].set(reducer, mesh.rank() == 2);
      const auto error = caught<MismatchError>([&] {
        run_both(reducer, step, mesh.rank());
        static_cast<void>(reducer.shard("w"));
      });
      ASSERT_TRUE(error);
      EXPECT_THAT(error->what(), rows[i].message);
      EXPECT_FALSE(error->ranks().empty());
    });
  }
}

std::int64_t tokens_of(int rank, int microbatch) { return 3 + 5 * rank + 7 * microbatch; }

std::vector<ParameterSpec> some_parameters(Dtype dtype) {
  return {{.name = "w", .shape = {501}, .dtype = dtype},
          {.name = "v", .shape = {33, 7}, .dtype = dtype},
          {.name = "s", .shape = {}, .dtype = dtype}};
}

// Runs twice: nothing counted in one step may reach the next.
TEST(CountedTokens, DivideAsAFactorOfTheirSumDoes) {
  const std::vector<std::vector<Sync>> schedules{{Sync::kAll},
                                                 {Sync::kNone, Sync::kShard, Sync::kAll},
                                                 {Sync::kShard, Sync::kNone},
                                                 {Sync::kNone}};
  for (const MeshShape shape : {kSquare, MeshShape{1, 3}, MeshShape{3, 1}, MeshShape{1, 1}}) {
    for (const Dtype dtype : kDtypes) {
      for (const std::vector<Sync>& schedule : schedules) {
        StepCase step = random_step(some_parameters(dtype), shape.size(), schedule, 7);
        step.finish = schedule.back() != Sync::kAll;
        step.loss_scale = 64.0;
        std::int64_t tokens = 0;
        for (int rank = 0; rank < shape.size(); ++rank) {
          for (int m = 0; m < std::ssize(schedule); ++m) tokens += tokens_of(rank, m);
        }
        step.divide_factor = static_cast<double>(tokens);
        expect_result(shape, step, {.bucket_bytes = 256}, [&](Reducer& reducer, const Mesh& mesh) {
          reducer.set_loss_scale(step.loss_scale);
          for (int round = 0; round < 2; ++round) {
            for (int m = 0; m < std::ssize(schedule); ++m) {
              reducer.divide_by_tokens(tokens_of(mesh.rank(), m));
              run_microbatch(reducer, step, m, mesh.rank(),
                             {.sync = schedule[static_cast<std::size_t>(m)]});
            }
            reducer.finish();
          }
        });
      }
    }
  }
}

// Ranks 0 to 3 count 3, 8, 13 and 18 tokens in each microbatch.
TEST(CountedTokens, OfItsShardGroupDivideAPartial) {
  const StepCase step = two_microbatches(Dtype::kF32, kSquare.size());
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    for (int m = 0; m < 2; ++m) {
      reducer.divide_by_tokens(3 + 5 * mesh.rank());
      run_microbatch(reducer, step, m, mesh.rank(), {.last = false});
    }
    const Own own{reducer, mesh, step};
    EXPECT_EQ(reducer.partial_shard("w"), own.partial(2, mesh.replica() == 0 ? 22.0F : 62.0F));
    reducer.finish();
    EXPECT_EQ(values_of(reducer.shard("w")), own.result(84.0F));
  });
}

TEST(CountedTokens, NoneAtAllGiveZeros) {
  StepCase step = integer_step({{.name = "w", .shape = {40}}}, 4, 1, 5);
  for (auto& gradient : step.gradients[0][0]) gradient->assign(gradient->size(), 0.0F);
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.divide_by_tokens(0);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
    EXPECT_THAT(values_of(reducer.shard("w")), testing::Each(0.0F));
  });
}

TEST(CountedTokens, AreAskedForBeforeEachMicrobatch) {
  const StepCase step = two_microbatches(Dtype::kF32, kSquare.size());
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.divide_by_tokens(3);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    EXPECT_THROW(reducer.begin_microbatch({.last = true}), UsageError);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});  // the step was dropped
    EXPECT_THROW(reducer.divide_by_tokens(3), UsageError);
    run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
    EXPECT_THROW(reducer.divide_by_tokens(-1), UsageError);
    reducer.set_gradient_divide_factor(2.0);
    EXPECT_THROW(reducer.divide_by_tokens(3), UsageError);
    reducer.set_gradient_divide_factor(std::nullopt);
    reducer.divide_by_tokens(3);
    EXPECT_THROW(reducer.set_gradient_divide_factor(2.0), UsageError);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
    static_cast<void>(reducer.shard("w"));
  });
}

// Rank 3 has no batch in the second of three microbatches, the others have one in each.
TEST(CountedBatches, AreWhatRanksHad) {
  for (const auto& [divide_by, factor] :
       {std::pair{DivideBy::kRanks, 11.0 / 3.0}, {DivideBy::kRanksMicrobatches, 11.0}}) {
    StepCase step =
        random_step(some_parameters(Dtype::kBf16), 4, {Sync::kNone, Sync::kShard, Sync::kAll}, 7);
    for (auto& gradients : step.gradients) gradients[1][3].reset();
    step.divide_factor = factor;
    const ReducerOptions options{.bucket_bytes = 256, .divide_by = divide_by};
    expect_result(kSquare, step, options, [&](Reducer& reducer, const Mesh& mesh) {
      for (int m = 0; m < 3; ++m) {
        run_microbatch(reducer, step, m, mesh.rank(),
                       {.sync = step.schedule[static_cast<std::size_t>(m)],
                        .has_batch = m != 1 || mesh.rank() != 3});
      }
    });
  }
}

TEST(CountedBatches, GradientsWithoutABatchDropTheStep) {
  const StepCase step = integer_step({{.name = "w", .shape = {40}}}, 4, 1, 5);
  expect_result(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    const auto fault = [&] {
      run_microbatch(reducer, step, 0, mesh.rank(), {.last = true, .has_batch = mesh.rank() != 1});
      static_cast<void>(reducer.shard("w"));
    };
    if (mesh.rank() == 1) {
      EXPECT_THROW(fault(), UsageError);
    } else {
      EXPECT_THROW(fault(), StepAbortedError);
    }
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
  });
}

TEST(CountedMicrobatches, MakeTheMeanOverThemToo) {
  StepCase step =
      random_step(some_parameters(Dtype::kF16), 4, {Sync::kShard, Sync::kNone, Sync::kAll}, 7);
  step.divide_factor = 12.0;
  const ReducerOptions options{.divide_by = DivideBy::kRanksMicrobatches};
  expect_result(kSquare, step, options, [&](Reducer& reducer, const Mesh& mesh) {
    run_schedule(reducer, step, mesh.rank());
  });
}

// Ranks 0 and 1 have one backward pass in the window, 2 and 3 have two.
TEST(CountedMicrobatches, ArePassesInAWindow) {
  StepCase step = two_microbatches(Dtype::kF32, kSquare.size());
  for (const std::size_t rank : {0U, 1U}) {
    auto& second = *step.gradients[0][1][rank];
    second.assign(second.size(), 0.0F);
  }
  const ReducerOptions options{.divide_by = DivideBy::kRanksMicrobatches};
  run_reducers(kSquare, step, options, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.begin_window({.last = true});
    const int passes = mesh.rank() < 2 ? 1 : 2;
    for (int m = 0; m < passes; ++m) run_microbatch(reducer, step, m, mesh.rank(), {});
    reducer.end_window();
    const Own own{reducer, mesh, step};
    EXPECT_EQ(values_of(reducer.shard("w")), own.result(6.0F));
  });
}

}  // namespace
}  // namespace hsdp
