// Rule 1 through the Reducer: what partials and results are divided by, and when that is decided.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

StepCase two_microbatches(Dtype dtype, int world_size) {
  return integer_step({{.name = "w", .shape = {40}, .dtype = dtype}}, world_size, 2, 5);
}

// Sum over ranks [first, first + count) and microbatches, of the elements of `slice`.
Values sum_of(const StepCase& step, int first, int count, int microbatch_count,
              const Slice& slice) {
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
  return sum;
}

Values divided_by(Values values, float divisor) {
  for (float& value : values) value /= divisor;
  return values;
}

// After one microbatch the partial is the shard-group mean; at the end the result is the mean over
// the world.
void check_default_factors(MeshShape shape, Dtype dtype) {
  const StepCase step = two_microbatches(dtype, shape.size());
  run_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    register_all(reducer, step);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    const Values partial = reducer.partial_shard("w");
    const Slice slice = reducer.slice("w");
    const int group = mesh.replica() * shape.shard;
    EXPECT_EQ(partial, divided_by(sum_of(step, group, shape.shard, 1, slice),
                                  static_cast<float>(shape.shard)));
    run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
    EXPECT_EQ(values_of(reducer.shard("w")), divided_by(sum_of(step, 0, shape.size(), 2, slice),
                                                        static_cast<float>(shape.size())));
  });
}

TEST(DivideFactor, FourReplicasOfEightShards) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    check_default_factors({.replicate = 4, .shard = 8}, dtype);
  }
}

TEST(DivideFactor, SizesThatAreNoPowerOfTwo) {
  for (const int shard : {3, 5, 6, 7}) {
    for (const int replicate : {1, 2}) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
        check_default_factors({.replicate = replicate, .shard = shard}, dtype);
      }
    }
  }
}

TEST(DivideFactor, GroupsOfOneContributeOne) {
  check_default_factors({.replicate = 1, .shard = 1}, Dtype::kF16);
  check_default_factors({.replicate = 3, .shard = 1}, Dtype::kF16);
  check_default_factors({.replicate = 1, .shard = 3}, Dtype::kF16);
}

TEST(DivideFactor, ARankWithAMissingGradientStillCounts) {
  StepCase step = two_microbatches(Dtype::kF32, 4);
  step.gradients[0][0][1].reset();
  step.gradients[0][1][1].reset();
  const ReducerOptions options{.missing = Missing::kZero};
  std::vector<RankResult> results(4);
  run_mesh({2, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    register_all(reducer, step);
    results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
  });
  expect_reference(results, step, options, {2, 2}, "missing");
}

// Ranks 0 to 3 count 3, 8, 13 and 18 tokens in each microbatch.
TEST(DivideFactor, OfAPartialCountsTheTokensOfItsShardGroup) {
  const StepCase step = two_microbatches(Dtype::kF32, 4);
  run_mesh({2, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    register_all(reducer, step);
    for (int m = 0; m < 2; ++m) {
      reducer.divide_by_tokens(3 + 5 * mesh.rank());
      run_microbatch(reducer, step, m, mesh.rank(), {.last = false});
    }
    EXPECT_EQ(reducer.partial_shard("w"),
              divided_by(sum_of(step, 2 * mesh.replica(), 2, 2, reducer.slice("w")),
                         mesh.replica() == 0 ? 22.0F : 62.0F));
    reducer.finish();
    EXPECT_EQ(values_of(reducer.shard("w")),
              divided_by(sum_of(step, 0, 4, 2, reducer.slice("w")), 84.0F));
  });
}

class ExplicitFactor : public testing::Test {
 protected:
  static constexpr MeshShape kShape{.replicate = 2, .shard = 2};
  // Runs `body(reducer, mesh)` on every rank with "w" registered.
  template <typename Body>
  void run(const StepCase& step, Body body) {
    run_mesh(kShape, [&](const Mesh& mesh) {
      Reducer reducer(mesh);
      register_all(reducer, step);
      body(reducer, mesh);
    });
  }
};

TEST_F(ExplicitFactor, MayBeSetUntilTheLastMicrobatchBeginsAndPersists) {
  const StepCase step = two_microbatches(Dtype::kBf16, kShape.size());
  run(step, [&](Reducer& reducer, const Mesh& mesh) {
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    reducer.set_gradient_divide_factor(7.0);  // token-weighted losses learn their count late
    const Slice slice = reducer.slice("w");
    const int group = mesh.replica() * kShape.shard;
    EXPECT_EQ(reducer.partial_shard("w"),
              divided_by(sum_of(step, group, kShape.shard, 1, slice), 7.0F));
    run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
    const Values sum = sum_of(step, 0, kShape.size(), 2, slice);
    EXPECT_EQ(values_of(reducer.shard("w")), divided_by(sum, 7.0F));
    for (int m = 0; m < 2; ++m) {
      run_microbatch(reducer, step, m, mesh.rank(), {.last = m == 1});
    }
    EXPECT_EQ(values_of(reducer.shard("w")), divided_by(sum, 7.0F)) << "persists";
    reducer.set_gradient_divide_factor(std::nullopt);
    for (int m = 0; m < 2; ++m) {
      run_microbatch(reducer, step, m, mesh.rank(), {.last = m == 1});
    }
    EXPECT_EQ(values_of(reducer.shard("w")), divided_by(sum, 4.0F)) << "default again";
  });
}

TEST_F(ExplicitFactor, SetBeforeFinishDividesItsResult) {
  const StepCase step = two_microbatches(Dtype::kF32, kShape.size());
  run(step, [&](Reducer& reducer, const Mesh& mesh) {
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    run_microbatch(reducer, step, 1, mesh.rank(), {.last = false});
    reducer.set_gradient_divide_factor(0.1);
    reducer.finish();
    EXPECT_EQ(
        values_of(reducer.shard("w")),
        divided_by(sum_of(step, 0, kShape.size(), 2, reducer.slice("w")), static_cast<float>(0.1)));
  });
}

TEST_F(ExplicitFactor, TogetherWithTheLossScaleIsOneFp32Division) {
  StepCase step = random_step({{.name = "w", .shape = {501}, .dtype = Dtype::kF16}}, kShape.size(),
                              {Sync::kShard, Sync::kAll}, 11);
  step.divide_factor = 3.3;
  step.loss_scale = 1000.7;
  std::vector<RankResult> results(4);
  run(step, [&](Reducer& reducer, const Mesh& mesh) {
    results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
  });
  expect_reference(results, step, {}, kShape, "f s");
}

TEST_F(ExplicitFactor, LossScaleDividesPartialsToo) {
  const StepCase step = two_microbatches(Dtype::kF32, kShape.size());
  run(step, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.set_loss_scale(1024.0);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    const int group = mesh.replica() * kShape.shard;
    EXPECT_EQ(reducer.partial_shard("w"),
              divided_by(sum_of(step, group, kShape.shard, 1, reducer.slice("w")), 2048.0F));
    reducer.discard();
  });
}

TEST_F(ExplicitFactor, IsRefusedInsideAMicrobatchAndWhenItCannotDivide) {
  const StepCase step = two_microbatches(Dtype::kF32, kShape.size());
  run(step, [&](Reducer& reducer, const Mesh& mesh) {
    for (const double bad : {0.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
      EXPECT_TRUE(caught<UsageError>([&] { reducer.set_gradient_divide_factor(bad); })) << bad;
      EXPECT_TRUE(caught<UsageError>([&] { reducer.set_loss_scale(bad); })) << bad;
    }
    reducer.begin_microbatch({.last = false});
    EXPECT_TRUE(caught<UsageError>([&] { reducer.set_gradient_divide_factor(2.0); }));
    EXPECT_TRUE(caught<UsageError>([&] { reducer.set_loss_scale(2.0); }));
    const auto stored = deliver(reducer, step, 0, mesh.rank());
    reducer.end_microbatch();
    EXPECT_TRUE(caught<UsageError>([&] { reducer.set_loss_scale(2.0); })) << "a step is pending";
    run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
    EXPECT_EQ(values_of(reducer.shard("w")),
              divided_by(sum_of(step, 0, kShape.size(), 2, reducer.slice("w")), 4.0F));
    reducer.set_loss_scale(2.0);
  });
}

TEST_F(ExplicitFactor, ThatDiffersBetweenRanksIsAMismatchOnAllRanks) {
  const StepCase step = two_microbatches(Dtype::kF32, kShape.size());
  run(step, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.set_gradient_divide_factor(mesh.rank() == 2 ? 5.0 : 4.0);
    const auto error = caught<MismatchError>([&] {
      for (int m = 0; m < 2; ++m) {
        run_microbatch(reducer, step, m, mesh.rank(), {.last = m == 1});
      }
      static_cast<void>(reducer.shard("w"));
    });
    ASSERT_TRUE(error);
    EXPECT_NE(std::string(error->what()).find("factor"), std::string::npos) << error->what();
    EXPECT_FALSE(error->ranks().empty());
  });
}

TEST_F(ExplicitFactor, LossScaleThatDiffersBetweenRanksIsAMismatchOnAllRanks) {
  const StepCase step = two_microbatches(Dtype::kF32, kShape.size());
  run(step, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.set_loss_scale(mesh.rank() == 0 ? 8.0 : 4.0);
    const auto error = caught<MismatchError>([&] {
      run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
      static_cast<void>(reducer.shard("w"));
    });
    ASSERT_TRUE(error);
    // Named by the status words, or by the replica hop when that comes first.
    const std::string text = error->what();
    EXPECT_TRUE(text.find("loss scale") != std::string::npos ||
                text.find("divisor") != std::string::npos)
        << text;
  });
}

}  // namespace
}  // namespace hsdp
