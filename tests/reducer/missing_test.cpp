// Which gradients a microbatch must bring, and what happens when it does not.
#include <gtest/gtest.h>

#include <array>

#include "hsdp/error.h"
#include "tests/support/faulty_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

std::vector<ParameterSpec> parameters_with_holes() {
  return {{.name = "first", .shape = {40, 3}},
          {.name = "second", .shape = {77}, .dtype = Dtype::kBf16},
          {.name = "third", .shape = {300}}};
}

StoredGradient gradient_of(const StepCase& step, std::size_t parameter, int microbatch, int rank) {
  return {*step.gradients[parameter][static_cast<std::size_t>(microbatch)]
                         [static_cast<std::size_t>(rank)],
          step.parameters[parameter].shape, step.parameters[parameter].dtype};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Rank 1 hands over what `misuse` says, in the microbatch with each sync.
using Misuse = std::function<void(Reducer&, const StepCase&, int microbatch, int rank)>;

void expect_dropped(const Misuse& misuse, const std::string& text, const std::string& others) {
  const std::vector<Sync> schedule{Sync::kShard, Sync::kNone, Sync::kAll};
  for (int m = 0; m < static_cast<int>(schedule.size()); ++m) {
    FaultyStep faulty{.step = random_step(parameters_with_holes(), kSquare.size(), schedule, 5),
                      .microbatch = m,
                      .bad_ranks = {1}};
    faulty.fault = [&](Reducer& reducer, int rank) {
      std::vector<StoredGradient> stored;
      Microbatch open(reducer, {.sync = schedule[static_cast<std::size_t>(m)]});
      misuse(reducer, faulty.step, m, rank);
      open.end();
    };
    const auto reports = run_faulty_step(kSquare, {.bucket_bytes = 256}, faulty);
    EXPECT_TRUE(reports[1].usage) << reports[1].text;
    EXPECT_TRUE(contains(reports[1].text, text)) << reports[1].text;
    expect_aborted(reports, faulty, others);
    expect_aborted(reports, faulty, "rank 1");
  }
}

TEST(MissingGradient, IsAnErrorThatNamesParameterAndRankEverywhere) {
  std::vector<StoredGradient> stored;
  expect_dropped(
      [&](Reducer& reducer, const StepCase& step, int m, int rank) {
        stored.clear();
        for (const std::size_t p : {0U, 2U}) {
          stored.push_back(gradient_of(step, p, m, rank));
          reducer.gradient_ready(step.parameters[p].name, stored.back().view());
        }
      },
      "second", "second");
}

TEST(MissingGradient, OfEveryParameterSaysThatNoneCame) {
  const std::string text =
      "got none at all (rank 1 of 4); run the backward pass (loss.backward()), or call "
      "gradient_ready, inside the microbatch, or use missing=\"zero\" when parameters may go "
      "unused";
  expect_dropped([](Reducer&, const StepCase&, int, int) {}, text, text);
}

TEST(SecondGradient, IsSeenAtOnce) {
  std::vector<StoredGradient> stored;
  expect_dropped(
      [&](Reducer& reducer, const StepCase& step, int m, int rank) {
        stored.clear();
        stored.push_back(gradient_of(step, 2, m, rank));
        reducer.gradient_ready("third", stored.back().view());
        reducer.gradient_ready("third", stored.back().view());
        ADD_FAILURE() << "the second gradient was accepted";
      },
      "third", "third");
}

TEST(UnknownGradient, IsSeenAtOnce) {
  std::vector<StoredGradient> stored;
  expect_dropped(
      [&](Reducer& reducer, const StepCase& step, int m, int rank) {
        stored.clear();
        stored.push_back(gradient_of(step, 2, m, rank));
        reducer.gradient_ready("fourth", stored.back().view());
        ADD_FAILURE() << "the unknown gradient was accepted";
      },
      "fourth", "");
  expect_dropped(
      [&](Reducer& reducer, const StepCase& step, int m, int rank) {
        stored.clear();
        stored.push_back(gradient_of(step, 2, m, rank));
        reducer.gradient_ready(3, stored.back().view());
        ADD_FAILURE() << "the unknown gradient was accepted";
      },
      "3", "");
}

TEST(RejectedGradient, DropsTheStepWithItsReason) {
  std::vector<StoredGradient> stored;
  expect_dropped(
      [&](Reducer& reducer, const StepCase& step, int m, int rank) {
        stored.clear();
        stored.reserve(step.parameters.size());
        for (std::size_t p = 0; p < step.parameters.size(); ++p) {
          stored.push_back(gradient_of(step, p, m, rank));
          reducer.gradient_ready(step.parameters[p].name, stored.back().view());
        }
        reducer.reject_gradient("gradient of 'third': it is sparse");
      },
      "it is sparse", "it is sparse");
}

TEST(WrongGradient, OfAnotherShapeDtypeOrDevice) {
  const Values values(300, 1.0F);
  const StoredGradient shaped(values, {30, 10}, Dtype::kF32);
  const StoredGradient shorter(Values(299, 1.0F), {299}, Dtype::kF32);
  const StoredGradient halved(values, {300}, Dtype::kF16);
  const StoredGradient right(values, {300}, Dtype::kF32);
  StridedView on_gpu = right.view();
  on_gpu.device.type = DeviceType::kCuda;
  StridedView extra_strides = right.view();
  extra_strides.strides = {1, 1};
  StridedView null = right.view();
  null.data = nullptr;
  for (const StridedView& wrong :
       {shaped.view(), shorter.view(), halved.view(), on_gpu, extra_strides, null}) {
    expect_dropped(
        [&](Reducer& reducer, const StepCase&, int, int) {
          reducer.gradient_ready("third", wrong);
          ADD_FAILURE() << "the wrong gradient was accepted";
        },
        "third", "");
  }
}

TEST(MissingAsZero, TheSetMayDifferBetweenMicrobatchesAndRanks) {
  const ReducerOptions options{.bucket_bytes = 256, .missing = Missing::kZero};
  StepCase step = random_step(parameters_with_holes(), kSquare.size(),
                              {Sync::kShard, Sync::kNone, Sync::kShard, Sync::kAll}, 3);
  // "second" only in the first microbatch, "third" only on one rank, later.
  for (std::size_t m = 0; m < 4; ++m) {
    for (std::size_t rank = 0; rank < 4; ++rank) {
      if (m > 0) step.gradients[1][m][rank].reset();
      if (m != 2 || rank != 3) step.gradients[2][m][rank].reset();
    }
  }
  std::vector<RankResult> results(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    register_all(reducer, step);
    results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
  });
  expect_reference(results, step, options, kSquare, "sparse gradients");
}

TEST(MissingAsZero, NoGradientAtAllIsZero) {
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.missing = Missing::kZero});
    reducer.register_parameter({.name = "w", .shape = {10}});
    for (const bool last : {false, true}) {
      reducer.begin_microbatch({.last = last});
      reducer.end_microbatch();
    }
    for (const float value : values_of(reducer.shard("w"))) EXPECT_EQ(value, 0.0F);
  });
}

TEST(MissingAsZero, TellsWhichParametersNoRankUsed) {
  StepCase step =
      random_step(parameters_with_holes(), kSquare.size(), {Sync::kNone, Sync::kAll}, 3);
  const auto take = [&step](std::size_t parameter, std::size_t but_rank) {
    for (auto& gradients : step.gradients[parameter]) {
      for (std::size_t rank = 0; rank < gradients.size(); ++rank) {
        if (rank != but_rank) gradients[rank].reset();
      }
    }
  };
  take(0, 4);                       // on no rank
  take(1, 2);                       // on rank 2 alone
  step.gradients[1][1][2].reset();  // and there in the first microbatch alone
  for (const Missing missing : {Missing::kZero, Missing::kError}) {
    run_mesh(kSquare, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.missing = missing});
      register_all(reducer, step);
      const bool is_error = missing == Missing::kError;
      if (is_error) {
        const StepCase whole =
            random_step(parameters_with_holes(), kSquare.size(), {Sync::kAll}, 3);
        run_step(reducer, whole, mesh.rank());
        EXPECT_EQ(reducer.unused_parameters(), std::vector<int>{});
        return;
      }
      for (int round = 0; round < 2; ++round) {
        run_step(reducer, step, mesh.rank());
        EXPECT_EQ(reducer.unused_parameters(), std::vector<int>{0});
      }
      const auto has = [&reducer] {
        return std::array{reducer.has_gradient(0), reducer.has_gradient(1),
                          reducer.has_gradient(2)};
      };
      constexpr std::array kNone{false, false, false};
      const std::array own{false, mesh.rank() == 2, true};
      EXPECT_EQ(has(), kNone);
      reducer.begin_microbatch({.last = false});
      EXPECT_EQ(has(), kNone);
      const auto stored = deliver(reducer, step, 0, mesh.rank());
      EXPECT_EQ(has(), own);
      reducer.end_microbatch();
      EXPECT_EQ(has(), own);
      reducer.discard();
      EXPECT_EQ(has(), kNone);
    });
  }
}

TEST(MissingAsZero, StillRefusesASecondGradient) {
  run_mesh({1, 1}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.missing = Missing::kZero});
    reducer.register_parameter({.name = "w", .shape = {10}});
    const StoredGradient gradient(Values(10, 1.0F), {10}, Dtype::kF32);
    EXPECT_TRUE(caught<UsageError>([&] {
      Microbatch open(reducer, {.last = true});
      reducer.gradient_ready("w", gradient.view());
      reducer.gradient_ready("w", gradient.view());
    }));
  });
}

class ManyBackwards : public testing::TestWithParam<Dtype> {};

// Repeats of one rank add up in fp32 before the one rounding of the pack.
TEST_P(ManyBackwards, AddRepeatsLocally) {
  constexpr int kRepeatCount = 3;
  const ReducerOptions options{.bucket_bytes = 256, .backwards = Backwards::kMany};
  const std::vector<ParameterSpec> specs{{.name = "w", .shape = {41, 3}, .dtype = GetParam()}};
  const StepCase repeats =
      random_step(specs, kSquare.size(), std::vector<Sync>(2 * kRepeatCount, Sync::kNone), 3);
  StepCase sums = random_step(specs, kSquare.size(), {Sync::kShard, Sync::kAll}, 3);
  for (std::size_t m = 0; m < 2; ++m) {
    for (std::size_t rank = 0; rank < 4; ++rank) {
      Values& sum = *sums.gradients[0][m][rank];
      sum.assign(sum.size(), 0.0F);
      for (std::size_t k = 0; k < kRepeatCount; ++k) {
        const Values& repeat = *repeats.gradients[0][m * kRepeatCount + k][rank];
        for (std::size_t i = 0; i < sum.size(); ++i) {
          sum[i] = k == 0 ? repeat[i] : sum[i] + repeat[i];
        }
      }
    }
  }
  std::vector<RankResult> results(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    register_all(reducer, sums);
    for (int m = 0; m < 2; ++m) {
      std::vector<StoredGradient> stored;
      Microbatch open(reducer, {.last = m == 1});
      for (int k = 0; k < kRepeatCount; ++k) {
        stored.push_back(gradient_of(repeats, 0, m * kRepeatCount + k, mesh.rank()));
        reducer.gradient_ready("w", stored.back().view());
      }
      open.end();
    }
    results[static_cast<std::size_t>(mesh.rank())] = read_result(reducer, sums);
  });
  expect_reference(results, sums, options, kSquare, "repeats");
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ManyBackwards, testing::Values(Dtype::kF32, Dtype::kBf16),
                         [](const auto& row) { return std::string(name(row.param)); });

// An f16 wire has room for as many as the rank that has most: sums of it alone are out of range.
TEST(ManyBackwardsF16, CountOfTheRankThatHasMost) {
  constexpr float kValue = 4096;
  constexpr int kMost = 16;
  for (const std::vector<Sync>& syncs : {std::vector<Sync>{Sync::kAll},
                                         {Sync::kNone, Sync::kAll},
                                         {Sync::kShard, Sync::kAll},
                                         {Sync::kShard, Sync::kNone}}) {
    for (const MeshShape shape : {kSquare, MeshShape{2, 1}, MeshShape{1, 2}}) {
      const auto ranks = static_cast<std::size_t>(shape.size());
      run_mesh(shape, [&](const Mesh& mesh) {
        Reducer reducer(mesh, {.reduce_dtype = Dtype::kF16, .backwards = Backwards::kMany});
        reducer.register_parameter({.name = "w", .shape = {10}});
        reducer.register_parameter({.name = "once", .shape = {3}});
        const StoredGradient gradient(Values(10, kValue), {10}, Dtype::kF32);
        const StoredGradient once(Values(3, kValue), {3}, Dtype::kF32);
        float expected = 0;
        for (std::size_t m = 0; m < syncs.size(); ++m) {
          Microbatch open(reducer, {.sync = syncs[m]});
          for (std::size_t rank = 0; rank < ranks; ++rank) {
            const int count = rank == m % ranks ? kMost : 1;
            expected += kValue * static_cast<float>(count) / static_cast<float>(ranks);
            if (static_cast<int>(rank) != mesh.rank()) continue;
            for (int k = 0; k < count; ++k) reducer.gradient_ready("w", gradient.view());
          }
          reducer.gradient_ready("once", once.view());
          open.end();
        }
        reducer.finish();
        EXPECT_FALSE(reducer.found_inf());
        for (const float value : values_of(reducer.shard("w"))) EXPECT_EQ(value, expected);
        for (const float value : values_of(reducer.shard("once"))) {
          EXPECT_EQ(value, kValue * static_cast<float>(syncs.size()));
        }
      });
    }
  }
}

TEST(ManyBackwardsSync, AlsoInMicrobatchesThatStayLocal) {
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.backwards = Backwards::kMany});
    reducer.register_parameter({.name = "w", .shape = {10}});
    const StoredGradient gradient(Values(10, 1.0F), {10}, Dtype::kF32);
    for (const Sync sync : {Sync::kNone, Sync::kShard, Sync::kAll}) {
      Microbatch open(reducer, {.sync = sync});
      reducer.gradient_ready("w", gradient.view());
      reducer.gradient_ready("w", gradient.view());
      open.end();
    }
    for (const float value : values_of(reducer.shard("w"))) EXPECT_EQ(value, 6.0F);
  });
}

}  // namespace
}  // namespace hsdp
