// A step dropped on any ranks, at any moment: inside a microbatch or between two, whatever the
// others do. All ranks stay usable, and count the same steps.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"
#include "tests/support/step_drops.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

std::vector<ParameterSpec> small_parameters(Dtype dtype) {
  return {{.name = "a", .shape = {13, 5}, .dtype = dtype},
          {.name = "b", .shape = {}, .dtype = dtype},
          {.name = "c", .shape = {70}, .dtype = dtype}};
}

struct Setting {
  MeshShape shape;
  Dtype dtype = Dtype::kF32;
  TransportChoice transport = TransportChoice::kAuto;
  Backwards backwards = Backwards::kOne;
  std::size_t stride = 7;  // through the cases
};
void PrintTo(const Setting& setting, std::ostream* out) { PrintTo(setting.shape, out); }

class EveryDrop : public testing::TestWithParam<Setting> {};

// One world runs all cases, with a second Reducer beside the one that drops steps.
TEST_P(EveryDrop, LeavesAllRanksUsableAndAtTheSameStep) {
  const Setting& setting = GetParam();
  const int size = setting.shape.size();
  const StepCase step = random_step(small_parameters(setting.dtype), size, std::vector<Sync>(5), 9);
  StepCase clean = step;
  clean.schedule = {Sync::kNone, Sync::kShard, Sync::kAll};
  const ReducerOptions options{.bucket_bytes = 128, .backwards = setting.backwards};
  std::vector<RankResult> results(static_cast<std::size_t>(size));
  run_mesh(
      setting.shape,
      [&](const Mesh& mesh) {
        const int rank = mesh.rank();
        Reducer reducer(mesh, options);
        Reducer other(mesh, options);
        register_all(reducer, step);
        register_all(other, step);
        const DropActions actions{
            .microbatch =
                [&](int m, Sync sync) { run_microbatch(reducer, step, m, rank, {.sync = sync}); },
            .broken_microbatch =
                [&](int m, Sync sync) {
                  std::vector<StoredGradient> stored;
                  Microbatch open(reducer, {.sync = sync});
                  for (const std::size_t p : {2U, 0U}) {
                    const Values& values = *step.gradients[p][static_cast<std::size_t>(m)]
                                                          [static_cast<std::size_t>(rank)];
                    stored.emplace_back(values, step.parameters[p].shape, step.parameters[p].dtype);
                    reducer.gradient_ready(step.parameters[p].name, stored.back().view());
                    if (m % 2 == 0) break;
                  }
                  throw OwnError();
                },
            .clean_step = [&] { return run_step(reducer, clean, rank).shards; }};
        const std::vector<Values> expected = actions.clean_step();
        const std::vector<DropCase> drops = every_drop(size);
        for (std::size_t i = 0; i < drops.size(); i += setting.stride) {
          const DropCase& drop = drops[i];
          run_microbatch(other, step, 0, rank, {.sync = Sync::kShard});
          run_drop(reducer, actions, drop, rank, expected);
          other.finish();
          if (testing::Test::HasFailure()) throw std::runtime_error("enough failures");
        }
        EXPECT_EQ(other.state().step, reducer.state().step / 2 - 1);
        results[static_cast<std::size_t>(rank)] = run_step(reducer, clean, rank);
      },
      {.transport = setting.transport});
  expect_reference(results, clean, options, setting.shape, "after all drops");
}

INSTANTIATE_TEST_SUITE_P(
    Settings, EveryDrop,
    testing::Values(Setting{.shape = {1, 1}, .stride = 1}, Setting{.shape = {1, 3}, .stride = 1},
                    Setting{{3, 1}}, Setting{.shape = {2, 2}, .stride = 2},
                    Setting{{2, 2}, Dtype::kF16}, Setting{{1, 3}, Dtype::kF16},
                    Setting{{2, 2}, Dtype::kBf16, TransportChoice::kTcp},
                    Setting{{2, 2}, Dtype::kF32, TransportChoice::kAuto, Backwards::kMany}),
    [](const auto& row) {
      return to_string(row.param.shape) + "_" + std::string(name(row.param.dtype)) +
             (row.param.transport == TransportChoice::kTcp ? "_tcp" : "") +
             (row.param.backwards == Backwards::kMany ? "_many" : "");
    });

// The others get no word while they add locally, and the rank that dropped waits for theirs with
// its next step.
TEST(DropBeforeALocalWindow, OutlivesTheTimeout) {
  const StepCase step = random_step(small_parameters(Dtype::kF32), 2, {Sync::kAll}, 3);
  constexpr std::chrono::milliseconds kTimeout{300};
  std::vector<RankResult> results(2);
  run_mesh({1, 2},
           [&](const Mesh& mesh) {
             Reducer reducer(mesh);
             register_all(reducer, step);
             if (mesh.rank() == 1) {
               reducer.begin_step();
               reducer.abandon_step("before a long window");
             } else {
               run_microbatch(reducer, step, 0, 0, {.sync = Sync::kNone});
               std::this_thread::sleep_for(3 * kTimeout);
               run_microbatch(reducer, step, 0, 0, {.sync = Sync::kNone});
               EXPECT_TRUE(caught<StepAbortedError>([&] { reducer.finish(); }));
             }
             results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
           },
           {.timeout = kTimeout});
  expect_reference(results, step, {}, {1, 2}, "after a long window");
}

TEST(DropReason, OfAMebibyteIsCut) {
  const StepCase step = random_step(small_parameters(Dtype::kF32), 2, {Sync::kAll}, 3);
  run_mesh({2, 1}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    register_all(reducer, step);
    if (mesh.rank() == 0) {
      reducer.begin_microbatch();
      reducer.abandon_step(std::string(1 << 20, 'r'));
      return reducer.finish();
    }
    const auto error = caught<StepAbortedError>([&] {
      run_microbatch(reducer, step, 0, 1, {.last = true});
      reducer.finish();
    });
    ASSERT_TRUE(error);
    const std::string text = error->what();
    EXPECT_NE(text.find(std::string(1024, 'r') + ";"), std::string::npos);
  });
}

TEST(DropReason, MayBeEmpty) {
  const StepCase step = random_step(small_parameters(Dtype::kF32), 2, {Sync::kAll}, 3);
  run_mesh({2, 1}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    register_all(reducer, step);
    if (mesh.rank() == 0) {
      reducer.begin_step();
      return reducer.abandon_step("");
    }
    EXPECT_TRUE(caught<StepAbortedError>([&] { run_step(reducer, step, 1); }));
  });
}

enum class End { kDestroyed, kClosed };

class DropAtTheEnd : public testing::TestWithParam<End> {};

// The others learn of it in their next microbatch, not by a timeout.
TEST_P(DropAtTheEnd, OfAPendingStepIsHeard) {
  const StepCase step =
      random_step(small_parameters(Dtype::kF32), 4, {Sync::kShard, Sync::kAll}, 3);
  const auto start = std::chrono::steady_clock::now();
  run_mesh(kSquare,
           [&](const Mesh& mesh) {
             Reducer reducer(mesh, {.bucket_bytes = 128});
             register_all(reducer, step);
             run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kShard});
             if (mesh.rank() == 2) {
               if (GetParam() == End::kClosed) reducer.close();
               return;
             }
             const auto error = caught<StepAbortedError>([&] {
               run_microbatch(reducer, step, 1, mesh.rank(), {.sync = Sync::kAll});
               static_cast<void>(reducer.shard("a"));
             });
             ASSERT_TRUE(error);
             EXPECT_EQ(error->ranks(), std::vector<int>{2});
           },
           {.timeout = std::chrono::seconds(60)});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30)) << "by a timeout";
}

INSTANTIATE_TEST_SUITE_P(Ends, DropAtTheEnd, testing::Values(End::kDestroyed, End::kClosed),
                         [](const auto& end) {
                           return end.param == End::kClosed ? "closed" : "destroyed";
                         });

// Whoever does not come at all cannot hold up a destructor for longer than the timeout.
TEST(DropAtTheEndAlone, EndsWithTheTimeout) {
  const StepCase step = random_step(small_parameters(Dtype::kF32), 2, {Sync::kAll}, 3);
  std::latch gone(2);
  run_mesh({1, 2},
           [&](const Mesh& mesh) {
             std::optional<Reducer> reducer(std::in_place, mesh);
             register_all(*reducer, step);
             run_step(*reducer, step, mesh.rank());
             reducer->begin_step();
             if (mesh.rank() == 0) reducer.reset();
             gone.arrive_and_wait();
           },
           {.timeout = std::chrono::milliseconds(300)});
}

// A gradient that is not there when it is to be packed.
class NeverProduced : public Event::State {
 public:
  [[nodiscard]] bool complete() const override { return false; }
  void wait() const override { throw Error("test: this gradient cannot be made"); }
};

TEST(DropReason, OfAFaultMayBeEmpty) {
  const StepCase step = random_step(small_parameters(Dtype::kF32), 2, {Sync::kNone, Sync::kAll}, 3);
  for (const Sync sync : {Sync::kNone, Sync::kAll}) {
    run_mesh({2, 1}, [&](const Mesh& mesh) {
      Reducer reducer(mesh);
      register_all(reducer, step);
      const auto run = [&] {
        Microbatch open(reducer, {.sync = sync});
        const std::vector<StoredGradient> stored = deliver(reducer, step, 0, mesh.rank());
        if (mesh.rank() == 1) reducer.reject_gradient("");
        open.end();
        reducer.finish();
      };
      if (mesh.rank() == 0) {
        EXPECT_TRUE(caught<StepAbortedError>(run));
      } else {
        EXPECT_TRUE(caught<UsageError>(run));
      }
    });
  }
}

TEST(FailedPack, DropsTheStepEverywhere) {
  const StepCase step =
      random_step(small_parameters(Dtype::kF32), 4, {Sync::kNone, Sync::kShard, Sync::kAll}, 3);
  for (int bad_microbatch = 0; bad_microbatch < 3; ++bad_microbatch) {
    std::vector<RankResult> results(4);
    run_mesh(kSquare, [&](const Mesh& mesh) {
      Reducer reducer(mesh);
      register_all(reducer, step);
      const auto run = [&] {
        for (int m = 0; m < 3; ++m) {
          Microbatch open(reducer, {.sync = step.schedule[static_cast<std::size_t>(m)]});
          std::vector<StoredGradient> stored;
          if (m == bad_microbatch && mesh.rank() == 3) {
            stored.emplace_back(*step.gradients[0][0][3], step.parameters[0].shape, Dtype::kF32);
            reducer.gradient_ready("a", stored.back().view(), {},
                                   Event(std::make_shared<NeverProduced>()));
            stored.emplace_back(*step.gradients[1][0][3], step.parameters[1].shape, Dtype::kF32);
            reducer.gradient_ready("b", stored.back().view());
            stored.emplace_back(*step.gradients[2][0][3], step.parameters[2].shape, Dtype::kF32);
            reducer.gradient_ready("c", stored.back().view());
          } else {
            stored = deliver(reducer, step, m, mesh.rank());
          }
          open.end();
        }
        reducer.finish();
      };
      if (mesh.rank() == 3) {
        const auto error = caught<Error>(run);
        ASSERT_TRUE(error);
        EXPECT_STREQ(error->what(), "test: this gradient cannot be made");
      } else {
        const auto error = caught<StepAbortedError>(run);
        ASSERT_TRUE(error);
        EXPECT_EQ(error->ranks(), std::vector<int>{3});
        EXPECT_NE(std::string(error->what()).find("cannot be made"), std::string::npos);
      }
      results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, step, mesh.rank());
      EXPECT_EQ(reducer.state().step, 1);
    });
    expect_reference(results, step, {}, kSquare, "after a failed pack");
  }
}

// A gradient that waits for staging is let go of, not packed: that would find nobody to tell. Here
// the last bucket of the microbatch before holds the staging, until the other rank has it too.
TEST(DropWithKeptGradients, DoesNotPackThem) {
  std::vector<ParameterSpec> parameters;
  for (int p = 0; p < 4; ++p) parameters.push_back({.name = std::to_string(p), .shape = {16}});
  const StepCase step = random_step(parameters, 2, {Sync::kShard, Sync::kAll}, 3);
  std::vector<RankResult> results(2);
  std::latch kept(1);
  run_mesh({1, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 64});
    register_all(reducer, step);
    const int rank = mesh.rank();
    if (rank == 1) {
      run_microbatch(reducer, step, 0, 1, {.sync = Sync::kShard});
      reducer.begin_microbatch({.sync = Sync::kAll});
      const StoredGradient gradient(*step.gradients[0][1][1], {16}, Dtype::kF32);
      reducer.gradient_ready("0", gradient.view(), {}, Event(std::make_shared<NeverProduced>()));
      kept.count_down();
      reducer.abandon_step("of this rank's own");
    } else {
      const auto error = caught<StepAbortedError>([&] {
        Microbatch open(reducer, {.sync = Sync::kShard});
        std::vector<StoredGradient> stored;
        for (std::size_t p = 0; p < 4; ++p) {
          if (p == 3) kept.wait();
          stored.emplace_back(*step.gradients[p][0][0], Shape{16}, Dtype::kF32);
          reducer.gradient_ready(static_cast<int>(p), stored.back().view());
        }
        open.end();
        run_microbatch(reducer, step, 1, 0, {.sync = Sync::kAll});
        reducer.finish();
      });
      ASSERT_TRUE(error);
      EXPECT_EQ(error->ranks(), std::vector<int>{1});
    }
    results[static_cast<std::size_t>(rank)] = run_step(reducer, step, rank);
  });
  expect_reference(results, step, {}, {1, 2}, "after a drop with kept gradients");
}

// Says so when somebody waits for it.
class ProducedOnCall : public Event::State {
 public:
  ProducedOnCall(std::latch& awaited, std::latch& produced)
      : awaited_(awaited), produced_(produced) {}
  [[nodiscard]] bool complete() const override { return produced_.try_wait(); }
  void wait() const override {
    awaited_.count_down();
    produced_.wait();
  }

 private:
  std::latch& awaited_;
  std::latch& produced_;
};

// A gradient that finds no staging joins its local sum on the thread that brings it, while another
// thread drops the step and has to wait for that.
TEST(DropWithAGradientUnderWay, WaitsUntilItHasJoinedTheLocalSum) {
  std::vector<ParameterSpec> parameters;
  for (int p = 0; p < 8; ++p) parameters.push_back({.name = std::to_string(p), .shape = {16}});
  const StepCase step = random_step(parameters, 2, {Sync::kNone, Sync::kShard, Sync::kAll}, 3);
  std::vector<RankResult> results(2);
  run_mesh({1, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 64});
    register_all(reducer, step);
    const int rank = mesh.rank();
    run_microbatch(reducer, step, 0, rank, {.sync = Sync::kNone});
    if (rank == 1) {
      std::latch awaited(1);
      std::latch produced(1);
      const StoredGradient gradient(*step.gradients[7][1][1], {16}, Dtype::kF32);
      reducer.begin_microbatch({.sync = Sync::kShard});
      std::thread backward([&] {
        reducer.gradient_ready("7", gradient.view(), {},
                               Event(std::make_shared<ProducedOnCall>(awaited, produced)));
      });
      awaited.wait();
      std::thread late([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // abandon_step() waits by then
        produced.count_down();
      });
      reducer.abandon_step("of this rank's own");
      backward.join();
      late.join();
    } else {
      EXPECT_TRUE(caught<StepAbortedError>([&] {
        run_microbatch(reducer, step, 1, rank, {.sync = Sync::kShard});
        run_microbatch(reducer, step, 2, rank, {.sync = Sync::kAll});
        reducer.finish();
      }));
    }
    results[static_cast<std::size_t>(rank)] = run_step(reducer, step, rank);
  });
  expect_reference(results, step, {}, {1, 2}, "after a drop with a gradient under way");
}

// What comes too late is left alone: nothing of it is read once abandon_step() has returned.
TEST(DropWithGradientsOfOtherThreads, ReadsNoneAfterwards) {
  for (const MeshShape shape : {MeshShape{1, 2}, MeshShape{2, 1}}) {
    std::vector<ParameterSpec> parameters;
    for (int p = 0; p < 12; ++p) {
      parameters.push_back({.name = std::to_string(p), .shape = {33 + p}});
    }
    const StepCase step = random_step(parameters, 2, {Sync::kNone, Sync::kShard, Sync::kAll}, 5);
    std::vector<RankResult> results(2);
    run_mesh(
        shape,
        [&](const Mesh& mesh) {
          Reducer reducer(mesh, {.bucket_bytes = 128});
          register_all(reducer, step);
          const int rank = mesh.rank();
          for (int round = 0; round < 60; ++round) {
            const int dropped = round / 2 % 3;
            try {
              for (int m = 0; m < 3; ++m) {
                const Sync sync = step.schedule[static_cast<std::size_t>(m)];
                if (rank != round % 2 || m != dropped) {
                  run_microbatch(reducer, step, m, rank, {.sync = sync});
                  continue;
                }
                reducer.begin_microbatch({.sync = sync});
                std::vector<StoredGradient> stored;
                for (std::size_t p = 0; p < parameters.size(); ++p) {
                  stored.emplace_back(*step.gradients[p][static_cast<std::size_t>(m)]
                                                     [static_cast<std::size_t>(rank)],
                                      parameters[p].shape, Dtype::kF32);
                }
                std::atomic<int> arrived{0};
                std::thread backward([&] {
                  try {
                    for (std::size_t p = 0; p < stored.size(); ++p, ++arrived) {
                      reducer.gradient_ready(static_cast<int>(p), stored[p].view());
                    }
                  } catch (const UsageError&) {  // no microbatch is open any more
                  }
                });
                while (arrived < round % 12) std::this_thread::yield();
                reducer.abandon_step("in between");
                for (StoredGradient& gradient : stored) gradient.poison();
                backward.join();
                throw OwnError();
              }
              reducer.finish();
            } catch (const OwnError&) {
            } catch (const StepAbortedError&) {
            }
          }
          results[static_cast<std::size_t>(rank)] = run_step(reducer, step, rank);
        },
        kPatient);
    expect_reference(results, step, {}, shape, "after drops in between");
  }
}

// Reads nothing of other ranks, and so waits for none.
TEST(DropBeforeALocalWindow, LeavesFoundInfAtOnce) {
  const StepCase step = random_step(small_parameters(Dtype::kF32), 2, {Sync::kAll}, 3);
  std::latch asked(1);
  run_mesh({1, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    register_all(reducer, step);
    reducer.begin_step();
    if (mesh.rank() == 1) {
      reducer.abandon_step("before anything");
      EXPECT_FALSE(reducer.found_inf());
      asked.count_down();
    } else {
      asked.wait();
      EXPECT_TRUE(caught<StepAbortedError>([&] { run_step(reducer, step, 0); }));
    }
  });
}

}  // namespace
}  // namespace hsdp
