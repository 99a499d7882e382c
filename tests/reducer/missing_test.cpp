// Which gradients a microbatch needs, and what happens without them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>

#include "hsdp/error.h"
#include "hsdp/reducer_internal.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<ParameterSpec> parameters_with_holes() {
  return {{.name = "first", .shape = {40, 3}},
          {.name = "second", .shape = {77}, .dtype = Dtype::kBf16},
          {.name = "third", .shape = {300}}};
}

// What rank 1 does in its open microbatch. The gradients in `stored` live until the microbatch
// ends.
using Misuse =
    std::function<void(Reducer&, const StepCase&, int m, std::vector<StoredGradient>& stored)>;

// For a microbatch of each sync: rank 1 gets its error, the other ranks are told that it was rank
// 1, none has a result, and the next step is right.
void expect_dropped(const Misuse& misuse, const std::string& own, const std::string& others) {
  const StepCase step = random_step(parameters_with_holes(), kSquare.size(),
                                    {Sync::kShard, Sync::kNone, Sync::kAll}, 5);
  for (int m = 0; m < 3; ++m) {
    expect_result(kSquare, step, {.bucket_bytes = 256}, [&](Reducer& reducer, const Mesh& mesh) {
      const auto run = [&] {
        for (int before = 0; before < m; ++before) {
          run_microbatch(reducer, step, before, 1,
                         {.sync = step.schedule[static_cast<std::size_t>(before)]});
        }
        std::vector<StoredGradient> stored;
        Microbatch open(reducer, {.sync = step.schedule[static_cast<std::size_t>(m)]});
        misuse(reducer, step, m, stored);
        open.end();
      };
      if (mesh.rank() == 1) {
        EXPECT_THAT(caught<UsageError>(run), says(HasSubstr(own)));
      } else {
        EXPECT_THAT(caught<StepAbortedError>([&] { run_step(reducer, step, mesh.rank()); }),
                    names({1}, testing::AllOf(HasSubstr("rank 1"), HasSubstr(others))));
      }
      EXPECT_THROW(static_cast<void>(reducer.shard("first")), UsageError);
      run_step(reducer, step, mesh.rank());
    });
  }
}

// Hands over those parameters' gradients, by name.
Misuse bringing(const std::vector<std::size_t>& parameters) {
  return [=](Reducer& reducer, const StepCase& step, int m, std::vector<StoredGradient>& stored) {
    for (const std::size_t p : parameters) {
      stored.push_back(gradient_of(step, p, m, 1));
      reducer.gradient_ready(step.parameters[p].name, stored.back().view());
    }
  };
}

TEST(MissingGradient, IsAnErrorThatNamesParameterAndRankEverywhere) {
  expect_dropped(bringing({0, 2}), "second", "second");
}

TEST(MissingGradient, OfEveryParameterSaysThatNoneCame) {
  const std::string text =
      "got none at all (rank 1 of 4); run the backward pass (loss.backward()), or call "
      "gradient_ready, inside the microbatch, or use missing=\"zero\" when parameters may go "
      "unused";
  expect_dropped(bringing({}), text, text);
}

TEST(RejectedGradient, DropsTheStepWithItsReason) {
  const auto reject = [](Reducer& reducer, const StepCase& step, int m,
                         std::vector<StoredGradient>& stored) {
    bringing({0, 1, 2})(reducer, step, m, stored);
    reducer.reject_gradient("gradient of 'third': it is sparse");
  };
  expect_dropped(reject, "it is sparse", "it is sparse");
}

// What is refused before any of it is used.
Misuse refused(const std::function<void(Reducer&, const StridedView& third)>& call) {
  return [=](Reducer& reducer, const StepCase& step, int m, std::vector<StoredGradient>& stored) {
    stored.push_back(gradient_of(step, 2, m, 1));
    call(reducer, stored.back().view());
    ADD_FAILURE() << "the wrong gradient was accepted";
  };
}

TEST(SecondGradient, IsSeenAtOnce) {
  const auto twice = [](Reducer& reducer, const StridedView& third) {
    for (int i = 0; i < 2; ++i) reducer.gradient_ready("third", third);
  };
  expect_dropped(refused(twice), "third", "third");
}

TEST(UnknownGradient, IsSeenAtOnce) {
  const auto by_name = [](Reducer& reducer, const StridedView& third) {
    reducer.gradient_ready("fourth", third);
  };
  const auto by_index = [](Reducer& reducer, const StridedView& third) {
    reducer.gradient_ready(3, third);
  };
  expect_dropped(refused(by_name), "fourth", "");
  expect_dropped(refused(by_index), "3", "");
}

TEST(WrongGradient, OfAnotherShapeDtypeOrDevice) {
  const std::vector<std::function<void(StridedView&)>> changes{
      [](StridedView& view) {
        view.shape = {30, 10}, view.strides = {10, 1};
      },
      [](StridedView& view) { view.shape = {299}; },
      [](StridedView& view) { view.dtype = Dtype::kF16; },
      [](StridedView& view) { view.device.type = DeviceType::kCuda; },
      [](StridedView& view) {
        view.strides = {1, 1};
      },
      [](StridedView& view) { view.data = nullptr; }};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    SCOPED_TRACE(i);
    const auto wrong = [&](Reducer& reducer, StridedView third) {
      changes[i](third);
      reducer.gradient_ready("third", third);
    };
    expect_dropped(refused(wrong), "third", "");
  }
}

TEST(MissingAsZero, NoGradientAtAllIsZero) {
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.missing = Missing::kZero});
    reducer.register_parameter({.name = "w", .shape = {10}});
    for (const bool last : {false, true}) {
      reducer.begin_microbatch({.last = last});
      reducer.end_microbatch();
    }
    EXPECT_THAT(values_of(reducer.shard("w")), Each(0.0F));
  });
}

TEST(MissingAsZero, TellsWhichParametersNoRankUsed) {
  StepCase step =
      random_step(parameters_with_holes(), kSquare.size(), {Sync::kNone, Sync::kAll}, 3);
  const StepCase whole = step;
  const auto take = [&step](std::size_t parameter, std::size_t but_rank) {
    for (auto& gradients : step.gradients[parameter]) {
      for (std::size_t rank = 0; rank < gradients.size(); ++rank) {
        if (rank != but_rank) gradients[rank].reset();
      }
    }
  };
  take(0, 4);                       // missing on every rank
  take(1, 2);                       // present on rank 2 only
  step.gradients[1][1][2].reset();  // and there only in the first microbatch
  run_reducers(kSquare, whole, {}, [&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, whole, mesh.rank());
    EXPECT_THAT(reducer.unused_parameters(), ElementsAre());
  });
  const ReducerOptions options{.missing = Missing::kZero};
  run_reducers(kSquare, step, options, [&](Reducer& reducer, const Mesh& mesh) {
    for (int round = 0; round < 2; ++round) {
      run_step(reducer, step, mesh.rank());
      EXPECT_THAT(reducer.unused_parameters(), ElementsAre(0));
    }
    const auto has = [&reducer] {
      return std::array{ReducerInternal(reducer).has_gradient(0),
                        ReducerInternal(reducer).has_gradient(1),
                        ReducerInternal(reducer).has_gradient(2)};
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

TEST(MissingAsZero, StillRefusesASecondGradient) {
  run_mesh({}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.missing = Missing::kZero});
    reducer.register_parameter({.name = "w", .shape = {10}});
    const StoredGradient gradient(Values(10, 1.0F), {10}, Dtype::kF32);
    reducer.begin_microbatch({.last = true});
    reducer.gradient_ready("w", gradient.view());
    EXPECT_THROW(reducer.gradient_ready("w", gradient.view()), UsageError);
  });
}

class ManyBackwards : public testing::TestWithParam<Dtype> {};

// Repeated gradients of one rank are added in fp32 before the pack rounds once.
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
  expect_result(kSquare, sums, options, [&](Reducer& reducer, const Mesh& mesh) {
    for (int m = 0; m < 2; ++m) {
      std::vector<StoredGradient> stored;
      Microbatch open(reducer, {.last = m == 1});
      for (int k = 0; k < kRepeatCount; ++k) {
        stored.push_back(gradient_of(repeats, 0, m * kRepeatCount + k, mesh.rank()));
        reducer.gradient_ready("w", stored.back().view());
      }
      open.end();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ManyBackwards, testing::Values(Dtype::kF32, Dtype::kBf16),
                         [](const auto& row) { return std::string(name(row.param)); });

// An f16 wire leaves headroom for the rank with the most gradients, whose sum alone would overflow.
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
        EXPECT_THAT(values_of(reducer.shard("w")), Each(expected));
        EXPECT_THAT(values_of(reducer.shard("once")),
                    Each(kValue * static_cast<float>(syncs.size())));
      });
    }
  }
}

}  // namespace
}  // namespace hsdp
