// The norm of the whole mean gradient, clipping by it, and non-finite values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <ostream>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::Each;
using testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

double norm_of(const StepCase& step, const ReducerOptions& options, MeshShape shape) {
  double sum = 0.0;
  for (const Values& mean : reference_results(step, options, shape)) {
    for (const float g : mean) sum += static_cast<double>(g) * g;
  }
  return std::sqrt(sum);
}

struct NormCase {
  MeshShape shape;
  ShardOver shard_over = ShardOver::kShard;
};

void PrintTo(const NormCase& row, std::ostream* out) {
  *out << to_string(row.shape) << "_" << word_of(row.shard_over);
}

class Norm : public testing::TestWithParam<NormCase> {
 protected:
  [[nodiscard]] static MeshShape shape() { return GetParam().shape; }
  [[nodiscard]] static ReducerOptions options() { return {.shard_over = GetParam().shard_over}; }
  [[nodiscard]] static StepCase step(std::uint64_t seed) {
    return random_step(odd_parameters(Dtype::kBf16), shape().size(), {Sync::kShard, Sync::kAll},
                       seed);
  }
};

TEST_P(Norm, IsThatOfTheWholeMeanAndEqualOnAllRanks) {
  const StepCase step = this->step(1);
  for (const Layout layout : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
    ReducerOptions options = this->options();
    options.layout = layout;
    options.bucket_bytes = 4 << 10;
    const double want = norm_of(step, options, shape());
    std::vector<double> norms(static_cast<std::size_t>(shape().size()));
    run_reducers(shape(), step, options, [&](Reducer& reducer, const Mesh& mesh) {
      run_step(reducer, step, mesh.rank());
      norms[static_cast<std::size_t>(mesh.rank())] = reducer.grad_norm();
    });
    EXPECT_NEAR(norms.front(), want, want * 1e-12);
    EXPECT_THAT(norms, Each(norms.front()));
  }
}

TEST_P(Norm, ClippingScalesTheShardsWhenAbove) {
  const StepCase step = this->step(2);
  const std::vector<Values> means = reference_results(step, options(), shape());
  const double want = norm_of(step, options(), shape());
  const double max_norm = want / 3.0;
  run_reducers(shape(), step, options(), [&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, step, mesh.rank());
    EXPECT_NEAR(reducer.clip_grad_norm(max_norm), want, want * 1e-12);
    EXPECT_NEAR(reducer.grad_norm(), max_norm, max_norm * 1e-5);
    EXPECT_LE(reducer.grad_norm(), max_norm * (1.0 + 1e-6));
    const std::vector<Values> clipped = gathered(reducer, step);
    for (std::size_t p = 0; p < means.size(); ++p) {
      for (std::size_t i = 0; i < means[p].size(); ++i) {
        ASSERT_NEAR(clipped[p][i], means[p][i] / 3.0, std::abs(means[p][i]) * 1e-5);
      }
      // The same on all replicas.
      Values own = clipped[p];
      mesh.replicate_group().broadcast(TensorView{own.data(), std::ssize(own), Dtype::kF32, {}}, 0);
      expect_same_bits(clipped[p], own, step.parameters[p].name);
    }
  });
}

TEST_P(Norm, ClippingBelowChangesNoBit) {
  const StepCase step = this->step(3);
  expect_result(shape(), step, options(), [&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, step, mesh.rank());
    static_cast<void>(reducer.clip_grad_norm(1e9));
  });
}

TEST_P(Norm, OfSeveralReducersIsOneNorm) {
  const StepCase first = step(4);
  const StepCase second = step(5);
  const double want =
      std::hypot(norm_of(first, options(), shape()), norm_of(second, options(), shape()));
  run_mesh(shape(), [&](const Mesh& mesh) {
    Reducer a(mesh, options());
    Reducer b(mesh, options());
    register_all(a, first);
    register_all(b, second);
    run_step(a, first, mesh.rank());
    run_step(b, second, mesh.rank());
    const double share = a.grad_norm() / want;
    Reducer* const both[] = {&a, &b};
    const std::array<Reducer*, 2> twice{both[0], both[0]};
    EXPECT_THROW(clip_grad_norm(twice, 2.0), UsageError);
    const std::array<Reducer*, 2> none{both[0], nullptr};
    EXPECT_THROW(clip_grad_norm(none, 2.0), UsageError);
    EXPECT_NEAR(clip_grad_norm(both, 2.0), want, want * 1e-12);
    EXPECT_NEAR(a.grad_norm(), share * 2.0, 1e-4);
    EXPECT_NEAR(std::hypot(a.grad_norm(), b.grad_norm()), 2.0, 2e-5);
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Norm,
                         testing::Values(NormCase{{1, 1}}, NormCase{{2, 2}}, NormCase{{1, 3}},
                                         NormCase{{3, 1}}, NormCase{{2, 2}, ShardOver::kMesh},
                                         NormCase{{3, 1}, ShardOver::kMesh}),
                         testing::PrintToStringParamName());

TEST(NormMisuse, WithoutAResultOrWithABadLimitIsAnError) {
  const StepCase step = random_step(odd_parameters(Dtype::kF32), 2, {Sync::kAll}, 1);
  run_reducers({1, 2}, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    EXPECT_THROW(static_cast<void>(reducer.grad_norm()), UsageError);
    run_step(reducer, step, mesh.rank());
    for (const double bad : {-1.0, std::nan("")}) {
      EXPECT_THROW(reducer.clip_grad_norm(bad), UsageError) << bad;
    }
    static_cast<void>(reducer.grad_norm());
  });
}

TEST(NormMisuse, OfAFactorSaysWhatItNeeds) {
  const StepCase step = random_step(odd_parameters(Dtype::kF32), 1, {Sync::kAll}, 1);
  run_reducers({1, 1}, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    double norm = 0.0;
    float factor = 0.0F;
    const TensorView norm_out{&norm, 1, Dtype::kF64, {}};
    const TensorView factor_out{&factor, 1, Dtype::kF32, {}};
    const auto refused = [&](std::vector<Reducer*> reducers, double max_norm,
                             const TensorView& norm_to, const TensorView& factor_to) {
      const auto error =
          caught<UsageError>([&] { clip_factor(reducers, max_norm, norm_to, factor_to); });
      return error ? std::string(error->what()) : "nothing";
    };
    EXPECT_THAT(refused({&reducer}, 1.0, norm_out, factor_out),
                HasSubstr("clip_factor: expected a finished step, got none"));
    run_step(reducer, step, mesh.rank());
    EXPECT_THAT(refused({}, 1.0, norm_out, factor_out), HasSubstr("expected Reducers, got none"));
    EXPECT_THAT(refused({&reducer}, -1.0, norm_out, factor_out), HasSubstr("a max_norm"));
    EXPECT_THAT(refused({&reducer}, 1.0, factor_out, factor_out),
                HasSubstr("expected an output of 1 f64 on cpu, got 1 f32 on cpu"));
    EXPECT_THAT(refused({&reducer}, 1.0, norm_out, {&factor, 1, Dtype::kBf16, {}}),
                HasSubstr("expected an output of 1 f64 on cpu, got 1 bf16 on cpu"));
    Reducer* const one[] = {&reducer};
    clip_factor(one, 0.0, norm_out, factor_out).wait();
    EXPECT_EQ(factor, 0.0F);
    EXPECT_EQ(norm, reducer.grad_norm()) << "nothing is scaled";
  });
}

// One element of one rank's gradient is set in one microbatch; every rank must find it.
struct Poison {
  std::string label;
  float value;
  Dtype gradient;
  ReducerOptions options;
  std::vector<Sync> schedule;
  int microbatch;
  bool found;
};

void PrintTo(const Poison& poison, std::ostream* out) { *out << poison.label; }

std::vector<Poison> poisons() {
  const std::vector<Sync> shards{Sync::kShard, Sync::kAll};
  const std::vector<Sync> local{Sync::kNone, Sync::kAll};
  const float nan = std::nanf("");
  return {
      {"inf_first", kInfinity, Dtype::kF32, {}, shards, 0, true},
      {"inf_last", -kInfinity, Dtype::kF32, {}, shards, 1, true},
      {"nan_first", nan, Dtype::kBf16, {}, shards, 0, true},
      {"nan_last", nan, Dtype::kF16, {}, shards, 1, true},
      {"nan_local", nan, Dtype::kF32, {}, local, 0, true},
      {"f16_pack_overflows", 7e4F, Dtype::kF32, {.reduce_dtype = Dtype::kF16}, shards, 0, true},
      {"f16_hop_overflows", 1e6F, Dtype::kF32, {.replica_dtype = Dtype::kF16}, shards, 1, true},
      {"f32_holds_it", 1e30F, Dtype::kF32, {}, shards, 1, false},
      {"bf16_holds_it", 1e6F, Dtype::kF32, {.replica_dtype = Dtype::kBf16}, shards, 1, false},
      {"f16_headroom_holds_it", 6e4F, Dtype::kF16, {}, local, 1, false},
  };
}

class FoundInf : public testing::TestWithParam<Poison> {};

void check_found_inf(const Poison& poison, MeshShape shape) {
  StepCase step =
      integer_step({{.name = "w", .shape = {100}, .dtype = poison.gradient}}, shape.size(), 2, 1);
  step.schedule = poison.schedule;
  const StepCase clean = step;
  (*step.gradients[0][static_cast<std::size_t>(poison.microbatch)].back())[3] = poison.value;
  std::vector<RankResult> results(static_cast<std::size_t>(shape.size()));
  run_reducers(shape, step, poison.options, [&](Reducer& reducer, const Mesh& mesh) {
    results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
    EXPECT_EQ(reducer.found_inf(), poison.found);
    EXPECT_EQ(reducer.found_inf(), poison.found) << "twice";
    run_step(reducer, clean, mesh.rank());
    EXPECT_FALSE(reducer.found_inf()) << "the next step";
  });
  expect_reference(results, step, poison.options, shape, poison.label);
}

TEST_P(FoundInf, IsTheOrOverTheWorldAndTheStep) { check_found_inf(GetParam(), {2, 2}); }

// On these meshes a microbatch is added to the carry without a hop, which would notice non-finite
// values.
TEST_P(FoundInf, CountsMicrobatchesThatNoHopSaw) {
  Poison poison = GetParam();
  if (poison.options.reduce_dtype) poison.found = false;  // nothing is rounded to it
  if (poison.options.replica_dtype != Dtype::kF16) check_found_inf(poison, {1, 1});
  check_found_inf(poison, {3, 1});
}

TEST(FoundInfOfAPendingStep, IsAUsageError) {
  const StepCase step =
      random_step({{.name = "w", .shape = {40}}}, 2, {Sync::kShard, Sync::kNone}, 3);
  run_reducers({1, 2}, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    float word = 0;
    for (int m = 0; m < 2; ++m) {
      run_microbatch(reducer, step, m, mesh.rank(),
                     {.sync = step.schedule[static_cast<std::size_t>(m)]});
      EXPECT_THROW(static_cast<void>(reducer.found_inf()), UsageError);
      EXPECT_THROW(reducer.found_inf({&word, 1, Dtype::kF32}), UsageError);
    }
    reducer.finish();
    EXPECT_FALSE(reducer.found_inf());
  });
}

INSTANTIATE_TEST_SUITE_P(Poisons, FoundInf, testing::ValuesIn(poisons()),
                         [](const auto& row) { return row.param.label; });

}  // namespace
}  // namespace hsdp
