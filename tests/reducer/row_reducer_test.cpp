// Rows that something else has scattered: their sums over any hop, and what ranks must agree on.
#include "hsdp/row_reducer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/fake_hop.h"
#include "tests/support/flipping_hop.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kEarly = 0;
constexpr int kLate = 1;

// Two modules. The second one's row has a gap, such as FSDP2's padding.
std::vector<RowGroup> two_modules() {
  return {{.name = "early",
           .parameters = {{"early.w", {3, 4}}},
           .ranges = {{0, 0, 12, 0}},
           .count = 12},
          {.name = "late",
           .parameters = {{"late.w", {5}}, {"late.b", {2}}},
           .ranges = {{0, 0, 5, 0}, {1, 6, 2, 0}},
           .count = 8}};
}

// The same with late.w frozen.
std::vector<RowGroup> frozen_modules() {
  std::vector<RowGroup> groups = two_modules();
  groups[kLate] = {
      .name = "late", .parameters = {{"late.b", {2}}}, .ranges = {{0, 0, 2, 0}}, .count = 2};
  return groups;
}

// Small integers, different for each backward, module, rank and element.
Values row_of(int backward, int module, int rank) {
  Values values(module == kEarly ? 12 : 8);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] =
        static_cast<float>((backward * 5 + module * 3 + rank * 7 + static_cast<int>(i)) % 9);
  }
  if (module == kLate) values[5] = 0;
  return values;
}

// The mean of those backwards over two replicas.
Values mean_of(const std::vector<int>& backwards, int module) {
  Values mean = row_of(0, module, 0);
  for (std::size_t i = 0; i < mean.size(); ++i) {
    mean[i] = 0;
    for (const int b : backwards) {
      for (int rank = 0; rank < 2; ++rank) {
        mean[i] += row_of(b, module, rank)[i] / 2;
      }
    }
  }
  return mean;
}

// One rank's model: what a backward leaves in its gradients.
class Modules {
 public:
  explicit Modules(const Mesh& mesh, std::shared_ptr<ReplicaHop> hop = {},
                   std::int64_t verify_every = 1)
      : rank_(mesh.rank()), rows(mesh, two_modules(), std::move(hop), verify_every) {}

  void set_last(bool last) { rows.set_requires_all_reduce(last, std::vector<int>{kEarly, kLate}); }
  // In the order of a backward: the last module first.
  void backward(int number, const std::set<int>& run = {kEarly, kLate}) {
    for (const int module : {kLate, kEarly}) {
      if (run.contains(module)) give(module, row_of(number, module, rank_));
    }
    rows.end_backward();
  }
  void give(int module, Values row) {
    if (!rows.requires_all_reduce(module)) {
      rows.keep(module, {.values = view(row)}, stream_);
      return;
    }
    rows.reduce(module, {.values = view(row)}, view(row), stream_);
    gradients[static_cast<std::size_t>(module)] = std::move(row);
  }
  std::vector<int> finish() {
    std::vector<int> left = rows.begin_finish();
    for (const int module : left) {
      Values total(two_modules()[static_cast<std::size_t>(module)].count, 99);
      rows.reduce(module, {}, view(total), stream_);
      gradients[static_cast<std::size_t>(module)] = std::move(total);
    }
    rows.end_finish();
    return left;
  }
  void step(const std::vector<int>& backwards) {
    for (const int b : backwards) {
      set_last(b == backwards.back());
      backward(b);
    }
  }
  void expect(const std::vector<int>& backwards, const std::string& label) {
    for (const int module : {kEarly, kLate}) {
      EXPECT_EQ(gradients[static_cast<std::size_t>(module)], mean_of(backwards, module)) << label;
    }
  }

 private:
  static TensorView view(Values& values) {
    return {values.data(), std::ssize(values), Dtype::kF32, {}};
  }

  int rank_;
  Stream stream_ = Stream::inline_host();

 public:
  RowReducer rows;
  std::array<Values, 2> gradients;
};

// Run on each of two replicas.
void run_two(const MeshBody& body) { run_patiently({2, 1}, body); }

TEST(RowReducer, SumsBackwardsAndReplicas) {
  run_two([](const Mesh& mesh) {
    Modules modules(mesh);
    for (int repeat = 0; repeat < 2; ++repeat) {
      modules.step({0, 1, 2});
      modules.expect({0, 1, 2}, "three backwards");
      EXPECT_EQ(modules.rows.kept_bytes(), 0);
      modules.step({3});
      modules.expect({3}, "one");
      EXPECT_TRUE(modules.finish().empty());
      EXPECT_TRUE(modules.finish().empty());
    }
    EXPECT_EQ(modules.rows.all_reduce_count(), 8);
  });
}

TEST(RowReducer, FinishesWhatDidNotRunInTheLastBackward) {
  run_two([](const Mesh& mesh) {
    Modules modules(mesh);
    modules.set_last(false);
    modules.backward(0);
    EXPECT_TRUE(modules.rows.keeps(kEarly));
    EXPECT_EQ(modules.rows.kept_bytes(), (12 + 8) * 4);
    modules.set_last(true);
    modules.backward(1, {kLate});
    EXPECT_THAT(caught<UsageError>([&] { modules.set_last(false); }),
                says(HasSubstr("those of early, which did not run")));
    EXPECT_THAT(modules.finish(), ElementsAre(kEarly));
    EXPECT_EQ(modules.gradients[kEarly], mean_of({0}, kEarly));
    EXPECT_EQ(modules.gradients[kLate], mean_of({0, 1}, kLate));
  });
}

// A module that ran on one replica only: the other one's gradients are zeros.
TEST(RowReducer, FinishesWhatOneReplicaHas) {
  run_two([](const Mesh& mesh) {
    Modules modules(mesh);
    modules.set_last(false);
    modules.backward(0, mesh.rank() == 0 ? std::set<int>{kEarly} : std::set<int>{});
    EXPECT_THAT(modules.finish(), ElementsAre(kEarly));
    Values half = row_of(0, kEarly, 0);
    for (float& value : half) value /= 2;
    EXPECT_EQ(modules.gradients[kEarly], half);
  });
}

TEST(RowReducer, KeepsWhatAModuleFlagSays) {
  run_two([](const Mesh& mesh) {
    Modules modules(mesh);
    modules.rows.set_requires_all_reduce(false, std::vector<int>{kEarly});
    modules.backward(0);
    EXPECT_EQ(modules.gradients[kLate], mean_of({0}, kLate));
    modules.rows.set_requires_all_reduce(true, std::vector<int>{kEarly});
    modules.backward(1);
    EXPECT_EQ(modules.gradients[kLate], mean_of({1}, kLate)) << "FSDP2 adds it to the first";
    EXPECT_EQ(modules.gradients[kEarly], mean_of({0, 1}, kEarly));
  });
}

TEST(RowReducer, RanksThatAreNotInTheSameBackwardAreToldAndGoOn) {
  run_two([](const Mesh& mesh) {
    Modules modules(mesh);
    const bool is_first = mesh.rank() == 0;
    const auto mismatch = [&](const std::function<void()>& call, const std::string& text) {
      EXPECT_THAT(caught<MismatchError>(call), says(HasSubstr(text)));
    };
    mismatch(
        [&] {
          modules.set_last(is_first);
          modules.backward(0);
          static_cast<void>(modules.finish());
        },
        "expected call");
    mismatch(
        [&] {
          if (is_first) modules.set_last(true);
          modules.set_last(true);
          modules.backward(0);
        },
        "once before each backward");
    mismatch(
        [&] {
          modules.rows.set_requires_all_reduce(is_first, std::vector<int>{kEarly});
          modules.backward(0);
        },
        "sync of early '");
    modules.step({4, 5});
    modules.expect({4, 5}, "after mismatches");
  });
}

TEST(RowReducer, AStepIsDroppedBetweenBackwards) {
  run_two([](const Mesh& mesh) {
    const auto hop = std::make_shared<FakeHop>();
    Modules modules(mesh, hop);
    for (int repeat = 0; repeat < 3; ++repeat) {
      modules.set_last(false);
      modules.backward(0);
      if (mesh.rank() == 0) {
        modules.rows.abandon_step("a bad batch");
        EXPECT_EQ(modules.rows.kept_bytes(), 0);
      } else {
        modules.set_last(true);
        const auto run_on = [&] {
          if (repeat == 2) {
            static_cast<void>(modules.finish());
          } else {
            modules.backward(1);
          }
        };
        EXPECT_THAT(caught<StepAbortedError>(run_on),
                    says(AllOf(HasSubstr("was dropped by rank 0 of 2"), HasSubstr("a bad batch"))));
      }
    }
    modules.set_last(false);
    modules.backward(0);
    modules.rows.abandon_step("all at once");
    modules.step({2, 4});
    EXPECT_TRUE(modules.finish().empty());
    EXPECT_THAT(outcomes(hop->ends()),
                ElementsAre(StepOutcome::kDropped, StepOutcome::kDropped, StepOutcome::kDropped,
                            StepOutcome::kDropped, StepOutcome::kClean));
  });
}

// The ranks have not agreed on the first drop yet, as none waits for another at that point.
TEST(RowReducer, WhoGoesAfterADropDropsTheNextStepToo) {
  for (const bool closes : {false, true}) {
    SCOPED_TRACE(closes);
    std::promise<void> gone;
    std::shared_future<void> is_gone = gone.get_future().share();
    run_two([&](const Mesh& mesh) {
      const auto hop = std::make_shared<FakeHop>();
      auto modules = std::make_unique<Modules>(mesh, hop);
      modules->set_last(false);
      modules->backward(0);
      if (mesh.rank() == 0) {
        modules->rows.abandon_step("a bad batch");
        modules->set_last(false);
        modules->backward(1);
        if (closes) modules->rows.close();
        modules.reset();
        gone.set_value();
      } else {
        is_gone.wait();
        for (const std::string why : {"a bad batch", "the hooks were taken out"}) {
          modules->set_last(true);
          EXPECT_THAT(caught<StepAbortedError>([&] { modules->backward(1); }),
                      says(HasSubstr(why)));
        }
      }
      EXPECT_THAT(outcomes(hop->ends()), ElementsAre(StepOutcome::kDropped, StepOutcome::kDropped));
    });
  }
}

// A rank that gives up after its last row, before it has heard from the other ranks, does not wait
// for them.
TEST(RowReducer, WhoLeavesABackwardAndDropsTheStepLetsTheOthersEndIt) {
  run_two([](const Mesh& mesh) {
    Modules modules(mesh);
    for (int repeat = 0; repeat < 3; ++repeat) {
      modules.set_last(true);
      for (const int module : {kLate, kEarly}) modules.give(module, row_of(0, module, mesh.rank()));
      if (mesh.rank() == 0) {
        modules.rows.leave_backward();
        modules.rows.abandon_step("it is enough");
      } else {
        modules.rows.end_backward();
        EXPECT_THAT(caught<StepAbortedError>([&] { modules.step({1}); }),
                    says(HasSubstr("it is enough")));
      }
      modules.step({2, 4});
      modules.expect({2, 4}, "the next one");
    }
  });
}

TEST(RowReducer, AFinishThatOneRankRefusesDropsTheStep) {
  run_two([](const Mesh& mesh) {
    FakeHop::Options options;
    bool refuses = false;
    options.on = [&refuses](std::string_view place) {
      if (refuses && place == "word") throw Error("hop: no words");
    };
    const auto hop = std::make_shared<FakeHop>(options);
    Modules modules(mesh, hop);
    modules.set_last(false);
    modules.backward(0);
    refuses = mesh.rank() == 1;
    const auto error = caught<Error>([&] { static_cast<void>(modules.finish()); });
    refuses = false;
    ASSERT_TRUE(error);
    EXPECT_THAT(error->what(), HasSubstr("hop: no words"));
    if (mesh.rank() == 0) {
      EXPECT_THAT(error->what(), HasSubstr("was dropped by rank 1 of 2"));
    }
    EXPECT_EQ(modules.rows.kept_bytes(), 0);
    modules.step({1, 2});
    EXPECT_TRUE(modules.finish().empty());
    EXPECT_THAT(outcomes(hop->ends()), ElementsAre(StepOutcome::kDropped, StepOutcome::kClean));
  });
}

// What a stateful hop receives: names, shapes, ranges with gaps, and one end for each step.
TEST(RowReducer, RunsAHopWithAState) {
  run_two([](const Mesh& mesh) {
    const auto hop = std::make_shared<FakeHop>();
    std::vector<Values> errors(2, Values(12));
    {
      Modules modules(mesh, hop);
      EXPECT_EQ(hop->plan().parameters[2].name, "late.b");
      EXPECT_EQ(hop->plan().ranges[1][1].parameter, 2);
      for (int s = 0; s < 3; ++s) {
        modules.step({s, s + 1});
        for (std::size_t i = 0; i < 12; ++i) {
          Values sums(2);
          Values error{errors[0][i], errors[1][i]};
          for (int r = 0; r < 2; ++r) {
            sums[static_cast<std::size_t>(r)] =
                row_of(s, kEarly, r)[i] + row_of(s + 1, kEarly, r)[i];
          }
          EXPECT_EQ(modules.gradients[kEarly][i], fake_mean(sums, 2, error)) << s << " " << i;
          errors[0][i] = error[0];
          errors[1][i] = error[1];
        }
        EXPECT_EQ(hop->ends().size(), static_cast<std::size_t>(s)) << "with the next word";
      }
      EXPECT_TRUE(modules.finish().empty());
      EXPECT_EQ(hop->ends().size(), 3U);
      Values infinite = row_of(0, kLate, 0);
      infinite[2] = std::numeric_limits<float>::infinity();
      modules.set_last(true);
      modules.give(kLate, infinite);
      modules.rows.end_backward();
      EXPECT_TRUE(modules.finish().empty());
      EXPECT_EQ(hop->ends().back().outcome, StepOutcome::kOverflow);
      modules.step({1});
      EXPECT_THROW(Modules(mesh, hop), UsageError);
    }
    EXPECT_EQ(hop->ends().size(), 5U) << "the last one when its owner went";
    EXPECT_EQ(hop->ends().back().outcome, StepOutcome::kDropped);
    Modules again(mesh, hop);
  });
}

// Once something has been summed, the other ranks rely on the rest of the backward.
TEST(RowReducer, AFailureInsideABackwardEndsTheWorld) {
  for (const bool leaves : {false, true}) {
    const auto start = std::chrono::steady_clock::now();
    run_two([&](const Mesh& mesh) {
      FakeHop::Options options;
      const bool fails = mesh.rank() == 1;
      int calls = 0;
      options.on = [&](std::string_view place) {
        if (!leaves && fails && place == "reduce" && ++calls == 2) throw Error("hop: no room");
      };
      Modules modules(mesh, std::make_shared<FakeHop>(options));
      modules.set_last(true);
      const auto error = caught<Error>([&] {
        modules.give(kLate, row_of(0, kLate, mesh.rank()));
        if (leaves && fails) {
          modules.rows.abandon_step("hop: no room");
          modules.set_last(true);
        }
        modules.give(kEarly, row_of(0, kEarly, mesh.rank()));
      });
      ASSERT_TRUE(error);
      EXPECT_THAT(error->what(), HasSubstr("hop: no room"));
      if (!fails) {
        EXPECT_THAT(error->what(), HasSubstr("rank 1 of 2"));
      }
      EXPECT_THROW(static_cast<void>(modules.finish()), Error);
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  }
}

// On one rank a row cannot be added, in a backward that reduces.
TEST(RowReducer, AWrongRowDropsTheStep) {
  run_two([](const Mesh& mesh) {
    Modules modules(mesh);
    if (mesh.rank() == 1) {
      EXPECT_THAT(caught<UsageError>([&] { modules.give(kLate, Values(7)); }),
                  says(HasSubstr("of late: expected 8 elements, got 7")));
    } else {
      EXPECT_THROW(modules.backward(0), StepAbortedError);
    }
    modules.step({1});
    modules.expect({1}, "after it");
  });
}

TEST(RowReducer, TakesOtherParametersBetweenSteps) {
  run_two([](const Mesh& mesh) {
    FakeHop::Options options;
    std::vector<std::string> calls;
    options.on = [&calls](std::string_view place) {
      if (place == "prepare" || place == "end_step") calls.emplace_back(place);
    };
    const auto hop = std::make_shared<FakeHop>(options);
    Modules modules(mesh, hop);
    modules.step({0});
    EXPECT_TRUE(modules.rows.begins_step());
    modules.rows.set_groups(frozen_modules());
    modules.set_last(true);
    modules.give(kLate, {2.0F + static_cast<float>(mesh.rank()), 4});
    EXPECT_EQ(modules.gradients[kLate][1], 4);
    EXPECT_EQ(hop->plan().parameters.size(), 2U);
    EXPECT_THAT(calls, ElementsAre("prepare", "end_step", "prepare"));
    EXPECT_FALSE(modules.rows.begins_step());
    EXPECT_THROW(modules.rows.set_groups(two_modules()), UsageError);
    modules.rows.end_backward();
  });
}

// As when parameters were frozen and unfrozen again: only a rank that ran a backward in between
// noticed.
TEST(RowReducer, TheSameParametersAgainAreNoChange) {
  run_two([](const Mesh& mesh) {
    FakeHop::Options options;
    int prepared = 0;
    options.on = [&prepared](std::string_view place) { prepared += place == "prepare" ? 1 : 0; };
    const auto hop = std::make_shared<FakeHop>(options);
    Modules modules(mesh, hop);
    modules.step({0});
    if (mesh.rank() == 0) {
      modules.rows.set_groups(frozen_modules());
      modules.rows.set_groups(two_modules());
    }
    modules.step({1});
    EXPECT_EQ(prepared, 1);
  });
}

TEST(RowReducer, OtherParametersOnOneRankAreAMismatch) {
  run_two([](const Mesh& mesh) {
    Modules modules(mesh);
    modules.step({0});
    std::vector<RowGroup> renamed = two_modules();
    renamed[kEarly].parameters[0].name = "early.v";
    if (mesh.rank() == 0) modules.rows.set_groups(renamed);
    EXPECT_THAT(caught<MismatchError>([&] { modules.step({1}); }),
                says(HasSubstr("expected trainable parameters '")));
    modules.rows.set_groups(renamed);
    modules.step({2});
    modules.expect({2}, "after it");
  });
}

// One rank believes that a step is over in which another one still is: both learn of it at once.
TEST(RowReducer, RanksThatAreAStepApartAreTold) {
  using Act = std::function<void(Modules&)>;
  struct Case {
    std::string name;
    Act first;
    Act second;
  };
  const Act goes_on = [](Modules& modules) { modules.step({1}); };
  const Act finishes = [](Modules& modules) { static_cast<void>(modules.finish()); };
  const std::vector<Case> cases{
      {"finish", goes_on, finishes},
      {"abandon", goes_on, [](Modules& modules) { modules.rows.abandon_step("no step"); }},
      {"early drop", finishes, [](Modules& modules) {
         modules.set_last(true);
         modules.rows.abandon_step("early");
       }}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    run_two([&](const Mesh& mesh) {
      const auto hop = std::make_shared<FakeHop>();
      Modules modules(mesh, hop);
      modules.step({0});
      const bool is_first = mesh.rank() == 0;
      const auto error = caught<Error>([&] { (is_first ? one.first : one.second)(modules); });
      EXPECT_TRUE(error.has_value() || !is_first);
      modules.step({2});
      modules.finish();
      EXPECT_EQ(hop->ends().back().outcome, StepOutcome::kClean);
      for (std::size_t s = 0; s < hop->ends().size(); ++s) {
        EXPECT_EQ(hop->ends()[s].step, static_cast<std::int64_t>(s));
      }
    });
  }
}

TEST(RowReducer, ARowThatIsRefusedFirstDropsItsOwnStep) {
  run_two([](const Mesh& mesh) {
    Modules modules(mesh);
    modules.backward(0);  // the flags make this the whole step
    if (mesh.rank() == 1) {
      modules.rows.reject("a bad row");
    } else {
      EXPECT_THROW(modules.backward(1), StepAbortedError);
    }
    modules.backward(2);
    modules.expect({2}, "after it");
  });
}

TEST(RowReducer, AHopThatCannotEndAStepEndsTheWorld) {
  run_two([](const Mesh& mesh) {
    FakeHop::Options options;
    options.on = [&mesh](std::string_view place) {
      if (place == "end_step" && mesh.rank() == 1) throw Error("hop: cannot commit");
    };
    Modules modules(mesh, std::make_shared<FakeHop>(options));
    modules.step({0});
    if (mesh.rank() == 0) static_cast<void>(caught<Error>([&] { modules.step({1}); }));
    const auto run_on = [&] {
      modules.step({1});
      modules.finish();
    };
    EXPECT_THAT(caught<Error>(run_on), says(HasSubstr("hop: cannot commit")));
  });
}

// An overflow in a dropped step does not count in the next one.
TEST(RowReducer, ADroppedStepLeavesNoOverflow) {
  run_two([](const Mesh& mesh) {
    const auto hop = std::make_shared<FakeHop>();
    Modules modules(mesh, hop);
    modules.rows.set_requires_all_reduce(false, std::vector<int>{kEarly});
    modules.give(kLate, Values(8, std::numeric_limits<float>::infinity()));
    modules.give(kEarly, row_of(0, kEarly, mesh.rank()));
    modules.rows.end_backward();
    modules.rows.abandon_step("on purpose");
    modules.step({1});
    modules.finish();
    ASSERT_EQ(hop->ends().size(), 2U);
    EXPECT_EQ(hop->ends().back().outcome, StepOutcome::kClean);
  });
}

TEST(RowReducer, ADescriptionThatFailsIsToldAndTheHopIsFreeAfterClose) {
  run_two([](const Mesh& mesh) {
    FakeHop::Options options;
    int left = mesh.rank() == 1 ? 1 : 0;
    options.on = [&left](std::string_view place) {
      if (place == "describe" && left-- > 0) throw Error("hop: no words");
    };
    const auto hop = std::make_shared<FakeHop>(options);
    EXPECT_THAT(caught<Error>([&] { Modules modules(mesh, hop); }),
                says(HasSubstr("hop: no words")));
    Modules modules(mesh, hop);
    modules.step({0});
    modules.rows.close();
    Modules again(mesh, hop);
    again.step({1});
  });
}

TEST(RowReducer, OtherModelsOrHopsAreAMismatch) {
  run_two([](const Mesh& mesh) {
    std::vector<RowGroup> groups = two_modules();
    if (mesh.rank() == 1) groups[kLate].parameters[1].shape = {3};
    auto error = caught<MismatchError>([&] { RowReducer rows(mesh, groups); });
    ASSERT_TRUE(error);
    EXPECT_THAT(error->what(), HasSubstr("expected late.b (2,) f32 on every rank, got late.b "
                                         "(3,) f32 on rank 1 of 2"));
    const Dtype wire = mesh.rank() == 0 ? Dtype::kF32 : Dtype::kBf16;
    error = caught<MismatchError>(
        [&] { RowReducer rows(mesh, two_modules(), std::make_shared<PlainHop>(wire)); });
    ASSERT_TRUE(error);
    EXPECT_THAT(error->what(), HasSubstr("the hop plain sends bf16 on rank 1 of 2"));
  });
}

// With one replica nothing is sent and the hop is never called.
TEST(RowReducer, OfOneReplicaSumsBackwards) {
  run_mesh({1, 2}, [](const Mesh& mesh) {
    Modules modules(mesh);
    modules.set_last(false);
    modules.backward(0);
    modules.set_last(true);
    modules.backward(1);
    Values sum = row_of(0, kEarly, mesh.rank());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += row_of(1, kEarly, mesh.rank())[i];
    EXPECT_EQ(modules.gradients[kEarly], sum);
    EXPECT_TRUE(modules.finish().empty());
    EXPECT_EQ(modules.rows.all_reduce_count(), 0);
  });
}

// Steps on every rank, with that flip on one of them, until the replicas' totals are found to
// differ; after finish() if it `finishes`.
std::vector<std::optional<MismatchError>> steps_with_flip(MeshShape shape, int flipping_rank,
                                                          const FlippingHop::Flip& flip,
                                                          std::int64_t every, bool finishes) {
  std::vector<std::optional<MismatchError>> first(static_cast<std::size_t>(shape.size()));
  run_patiently(shape, [&](const Mesh& mesh) {
    const bool flips = mesh.rank() == flipping_rank;
    Modules modules(mesh, std::make_shared<FlippingHop>(flips ? flip : FlippingHop::Flip()), every);
    for (int step = 0; step < 4; ++step) {
      auto error = caught<MismatchError>([&] {
        modules.step({0, 1});
        if (finishes) static_cast<void>(modules.finish());
      });
      if (!error) continue;
      EXPECT_EQ(step, flip.step + (finishes ? 0 : 1));
      first[static_cast<std::size_t>(mesh.rank())] = error;
      return;
    }
  });
  return first;
}

TEST(RowReducer, VerifyEveryNamesParameterAndRankOfOneFlippedBit) {
  constexpr MeshShape kShape{3, 2};
  struct Place {
    int module;
    std::int64_t element;
    std::string name;
  };
  for (int rank = 0; rank < kShape.size(); ++rank) {
    for (const Place& place :
         {Place{kEarly, 11, "'early.w' of early"}, Place{kLate, 0, "'late.w' of late"},
          Place{kLate, 7, "'late.b' of late"}}) {
      for (const bool finishes : {false, true}) {
        const FlippingHop::Flip flip{FlippingHop::When::kAfterSum, 1, place.module,
                                     32 * place.element};
        const std::string on = "on rank " + std::to_string(rank) + " of 6 than on the rest";
        for (const auto& error : steps_with_flip(kShape, rank, flip, 2, finishes)) {
          EXPECT_THAT(error,
                      names({rank}, AllOf(HasSubstr("replica_hook: verify_every: expected the same "
                                                    "result of " +
                                                    place.name),
                                          HasSubstr("in step 1"), HasSubstr(on))));
        }
      }
    }
  }
}

// Step 1 is no third one, a flip before the sum is in all totals, and padding is nobody's.
TEST(RowReducer, VerifyEveryDoesNotSeeWhatItDoesNotCompare) {
  using When = FlippingHop::When;
  const auto expect_none = [](const FlippingHop::Flip& flip, std::int64_t every) {
    for (const auto& error : steps_with_flip({2, 1}, 1, flip, every, true)) {
      EXPECT_EQ(error, std::nullopt);
    }
  };
  expect_none({When::kAfterSum, 1, kEarly, 0}, 3);
  expect_none({When::kAfterSum, 1, kEarly, 0}, 0);
  expect_none({When::kBeforeSum, 1, kEarly, 0}, 1);
  expect_none({When::kAfterSum, 1, kLate, 32 * 5}, 1);
}

// Also with rows that are left over, dropped steps, and parameters that are frozen between steps.
TEST(RowReducer, VerifyEveryIsContentWithEqualTotals) {
  run_two([](const Mesh& mesh) {
    Modules modules(mesh, {}, 1);
    modules.step({0, 1});
    modules.expect({0, 1}, "compared");
    modules.set_last(false);
    modules.backward(0);
    modules.set_last(true);
    modules.backward(1, {kEarly});
    EXPECT_THAT(modules.finish(), ElementsAre(kLate));
    modules.rows.set_groups(frozen_modules());
    modules.rows.set_groups(two_modules());
    modules.set_last(false);
    modules.backward(0);
    if (mesh.rank() == 1) {
      modules.rows.abandon_step("a bad batch");
    } else {
      modules.set_last(true);
      EXPECT_THROW(modules.backward(1), StepAbortedError);
    }
    for (int step = 0; step < 3; ++step) modules.step({0, 1});
    modules.finish();
    modules.expect({0, 1}, "after a drop");
  });
}

// Neither in the next step, which is not compared, nor in the one after it.
TEST(RowReducer, VerifyEveryForgetsADroppedStep) {
  run_two([](const Mesh& mesh) {
    const auto when = mesh.rank() == 1 ? FlippingHop::When::kAfterSum : FlippingHop::When::kNever;
    Modules modules(mesh, std::make_shared<FlippingHop>(FlippingHop::Flip{when, 1, kEarly, 0}), 2);
    modules.step({0, 1});
    modules.finish();
    modules.rows.set_requires_all_reduce(false, std::vector<int>{kLate});
    modules.backward(0);
    if (mesh.rank() == 1) {
      modules.rows.abandon_step("a bad batch");
    } else {
      modules.set_last(true);
      EXPECT_THROW(modules.backward(1), StepAbortedError);
    }
    for (int step = 2; step < 5; ++step) {
      modules.step({0, 1});
      modules.finish();
      modules.expect({0, 1}, "step " + std::to_string(step));
    }
  });
}

TEST(RowReducer, VerifyEveryIsTheSameOnAllRanks) {
  run_two([](const Mesh& mesh) {
    EXPECT_THAT(caught<MismatchError>([&] { const Modules modules(mesh, {}, mesh.rank()); }),
                names({1}, HasSubstr("expected verify_every 0 on every rank, got verify_every 1")));
    EXPECT_THAT(caught<UsageError>([&] { const Modules modules(mesh, {}, -1); }),
                says(HasSubstr("expected verify_every of at least 1, or 0 for no step, got -1")));
    Modules modules(mesh);
    modules.step({0});
  });
}

}  // namespace
}  // namespace hsdp
