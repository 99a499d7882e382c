// Ranks that disagree and worlds that end: every rank soon gets an error, and every later call
// repeats it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <latch>
#include <ostream>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::HasSubstr;

constexpr int kOddRank = 2;

struct Disagreement {
  std::string label;
  std::vector<ParameterSpec> common;
  std::vector<ParameterSpec> odd;
  std::string text;  // what the message names
};

void PrintTo(const Disagreement& row, std::ostream* out) { *out << row.label; }

std::vector<Disagreement> disagreements() {
  const ParameterSpec a{.name = "alpha", .shape = {10, 3}};
  const ParameterSpec b{.name = "beta", .shape = {20}};
  ParameterSpec renamed = b;
  renamed.name = "gamma";
  ParameterSpec reshaped = b;
  reshaped.shape = {4, 5};
  ParameterSpec retyped = b;
  retyped.dtype = Dtype::kBf16;
  ParameterSpec rewired = b;
  rewired.reduce_dtype = Dtype::kBf16;
  ParameterSpec regrouped = b;
  regrouped.group = "other";
  return {{"name", {a, b}, {a, renamed}, "gamma"},   {"shape", {a, b}, {a, reshaped}, "beta"},
          {"dtype", {a, b}, {a, retyped}, "beta"},   {"wire", {a, b}, {a, rewired}, "beta"},
          {"group", {a, b}, {a, regrouped}, "beta"}, {"order", {a, b}, {b, a}, "alpha"},
          {"one_less", {a, b}, {a}, "beta"},         {"one_more", {a}, {a, b}, "beta"}};
}

class RegistrationMismatch : public testing::TestWithParam<Disagreement> {};

TEST_P(RegistrationMismatch, NamesTheFirstDifferenceOnEveryRank) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    const bool odd = mesh.rank() == kOddRank;
    Reducer reducer(mesh);
    for (const ParameterSpec& spec : odd ? GetParam().odd : GetParam().common) {
      reducer.register_parameter(spec);
    }
    for (int call = 0; call < 2; ++call) {  // the second repeats the first
      const auto error = caught<MismatchError>([&] { reducer.begin_microbatch({.last = true}); });
      ASSERT_TRUE(error);
      EXPECT_THAT(error->what(), HasSubstr(GetParam().text));
      EXPECT_FALSE(error->ranks().empty());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Differences, RegistrationMismatch, testing::ValuesIn(disagreements()),
                         [](const auto& row) { return row.param.label; });

TEST(OptionMismatch, IsAnErrorOnEveryRankBeforeAnythingIsReduced) {
  const std::vector<ReducerOptions> odd_options{{.name = "critic"},
                                                {.reduce_dtype = Dtype::kBf16},
                                                {.replica_dtype = Dtype::kF16},
                                                {.layout = Layout::kDim0},
                                                {.bucket_bytes = 1 << 10},
                                                {.missing = Missing::kZero},
                                                {.backwards = Backwards::kMany},
                                                {.accumulate_dtype = AccumulateDtype::kParam}};
  for (std::size_t i = 0; i < odd_options.size(); ++i) {
    run_mesh(kSquare, [&](const Mesh& mesh) {
      const auto error = caught<MismatchError>([&] {
        Reducer reducer(mesh, mesh.rank() == kOddRank ? odd_options[i] : ReducerOptions{});
        reducer.register_parameter({.name = "w", .shape = {1000}});
        reducer.begin_microbatch({.last = true});
        reducer.abandon_step("should not have begun");
      });
      EXPECT_TRUE(error) << "options " << i;
    });
  }
}

// Each message of a set-up says which set-up it belongs to, so that no other one takes it for its
// own.
TEST(AnotherNumberOfReducers, IsNamedOnEveryRankAndMayBeMended) {
  run_patiently(kSquare, [](const Mesh& mesh) {
    Reducer first(mesh);
    first.register_parameter({.name = "w", .shape = {4}});
    const auto make_another = [&] {
      if (mesh.rank() == kOddRank) first.begin_microbatch({.last = true});
      const Reducer second(mesh);
    };
    EXPECT_THAT(
        caught<MismatchError>(make_another),
        names({kOddRank}, HasSubstr("expected 'make its Reducer' on every rank, got 'compare its "
                                    "registered parameters' on rank 2 of 4")));
    const Reducer second(mesh);
  });
}

constexpr std::chrono::seconds kWellBefore{30};  // long before kPatient ends

TEST(NoRegistration, OnOneRankIsNamedOnEveryRankAtOnce) {
  for (const int odd : {0, kOddRank}) {
    const auto start = std::chrono::steady_clock::now();
    run_patiently(kSquare, [&](const Mesh& mesh) {
      Reducer reducer(mesh);
      if (mesh.rank() != odd) reducer.register_parameter({.name = "w", .shape = {10}});
      for (int call = 0; call < 2; ++call) {  // the second repeats the first
        EXPECT_THAT(caught<MismatchError>([&] { reducer.begin_microbatch({}); }),
                    names({odd}, HasSubstr("got none on rank " + std::to_string(odd))));
      }
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, kWellBefore);
  }
}

// If all ranks make the same mistake there is no mismatch, and they can correct it.
TEST(NoRegistration, OnAllRanksIsAUsageErrorAndTheReducerGoesOn) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    EXPECT_THROW(reducer.begin_microbatch({.last = true}), UsageError);
    reducer.register_parameter({.name = "w", .shape = {4}});
    const std::vector<float> ones(4, 1.0F);
    reducer.begin_microbatch({.last = true});
    reducer.gradient_ready("w", {.data = ones.data(), .shape = {4}});
    reducer.end_microbatch();
    EXPECT_EQ(reducer.grad_norm(), 2.0);
  });
}

struct BadOptions {
  ReducerOptions options;
  std::string text;  // what the message says on every rank
};

TEST(BadOptions, OfOneRankAreRepeatedOnEveryRankAtOnceAndTheMeshGoesOn) {
  const std::vector<BadOptions> cases{
      {{.bucket_bytes = 0}, "expected bucket_bytes of at least 1, got 0"},
      {{.reduction = "native"}, "expected reduction 'exact' on the host engine, got 'native'"},
      {{.reduction = "foo"}, "got 'foo'"},
      {{.reduce_dtype = Dtype::kF64}, "got f64"}};
  const auto start = std::chrono::steady_clock::now();
  run_patiently(kSquare, [&](const Mesh& mesh) {
    for (const BadOptions& bad : cases) {
      if (mesh.rank() == kOddRank) {
        EXPECT_THAT(caught<UsageError>([&] { Reducer(mesh, bad.options); }),
                    says(HasSubstr(bad.text)));
      } else {
        EXPECT_THAT(caught<StepAbortedError>([&] { const Reducer fine(mesh); }),
                    names({kOddRank}, AllOf(HasSubstr("rank 2 of 4"), HasSubstr(bad.text))));
      }
    }
    const Reducer good(mesh);
    EXPECT_EQ(good.stats().engine, "host");
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, kWellBefore);
}

// One rank has another schedule. Local microbatches send nothing: the number in the next word
// tells.
TEST(SyncMismatch, IsAnErrorOnEveryRank) {
  using Schedule = std::vector<Sync>;
  struct Row {
    Schedule common;
    Schedule odd;
    std::string text;
  };
  const std::vector<Row> rows{
      {{Sync::kAll}, {Sync::kShard}, ""},
      {{Sync::kShard}, {Sync::kAll}, ""},
      {{Sync::kNone}, {Sync::kShard}, ""},
      {{Sync::kShard}, {Sync::kNone}, ""},
      {{Sync::kNone, Sync::kShard}, {Sync::kShard, Sync::kNone}, "microbatch"},
      {{Sync::kNone, Sync::kNone, Sync::kAll}, {Sync::kNone, Sync::kAll}, "microbatch"}};
  const StepCase step = integer_step({{.name = "w", .shape = {1000}}}, kSquare.size(), 3, 1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto start = std::chrono::steady_clock::now();
    const auto run = [&](Reducer& reducer, const Mesh& mesh) {
      SCOPED_TRACE(i);
      StepCase own = step;
      own.schedule = mesh.rank() == kOddRank ? rows[i].odd : rows[i].common;
      const auto run_and_read = [&] {
        run_schedule(reducer, own, mesh.rank());
        reducer.finish();
        static_cast<void>(reducer.shard("w"));
      };
      EXPECT_THAT(caught<MismatchError>(run_and_read), says(HasSubstr(rows[i].text)));
      EXPECT_THROW(reducer.finish(), MismatchError) << "repeats";
    };
    run_reducers(kSquare, step, {.bucket_bytes = 1 << 10}, run, kPatient);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10))
        << "found by the timeout, not by the status words";
  }
}

TEST(FailedWorld, EveryCallRepeatsTheFirstErrorButTheLastResultStays) {
  const StepCase step = integer_step({{.name = "w", .shape = {1000}}}, kSquare.size(), 1, 1);
  // Not the world's barrier: a rank may still be in it when another one aborts the world.
  std::latch stepped(kSquare.size());
  run_reducers(kSquare, step, {.bucket_bytes = 1 << 10}, [&](Reducer& reducer, const Mesh& mesh) {
    const RankResult result = run_step(reducer, step, mesh.rank());
    stepped.arrive_and_wait();
    if (mesh.rank() == kOddRank) mesh.world().abort("the test ends this world");
    EXPECT_EQ(values_of(reducer.shard("w")), result.shards[0]);
    const auto use = [&] {
      // This rank may learn of the end only after some more steps.
      for (;;) {
        run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
        static_cast<void>(reducer.shard("w"));
      }
    };
    const auto first = caught<Error>(use);
    ASSERT_TRUE(first);
    EXPECT_THAT(first->what(), HasSubstr("the test ends this world"));
    for (const auto& call : std::vector<std::function<void()>>{
             use, [&] { reducer.finish(); }, [&] { reducer.discard(); },
             [&] { static_cast<void>(reducer.grad_norm()); },
             [&] { reducer.set_gradient_divide_factor(2.0); }}) {
      EXPECT_THAT(caught<Error>(call), says(first->what()));
    }
    EXPECT_EQ(reducer.stats().engine, "host");
    reducer.close();
  });
}

}  // namespace
}  // namespace hsdp
