// Any ranks drop a step, at any moment: inside a microbatch or between two, whatever the other
// ranks do. All ranks stay usable and count the same steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
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
  std::size_t first = 0;   // case
  std::size_t stride = 7;  // from one case to the next
};
void PrintTo(const Setting& setting, std::ostream* out) { PrintTo(setting.shape, out); }

class EveryDrop : public testing::TestWithParam<Setting> {};

// One world runs all cases. A second Reducer works beside the one that drops steps.
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
        std::size_t broken = 0;
        const DropActions actions{
            .microbatch =
                [&](int m, Sync sync) { run_microbatch(reducer, step, m, rank, {.sync = sync}); },
            .broken_microbatch =
                [&](int m, Sync sync) {
                  std::vector<StoredGradient> stored;
                  Microbatch open(reducer, {.sync = sync});
                  const std::size_t arrived = broken++ % (step.parameters.size() + 1);
                  for (std::size_t p = 0; p < arrived; ++p) {
                    stored.push_back(gradient_of(step, p, m, rank));
                    reducer.gradient_ready(static_cast<int>(p), stored.back().view());
                  }
                  throw OwnError();
                },
            .clean_step = [&] { return run_step(reducer, clean, rank).shards; }};
        const std::vector<Values> expected = actions.clean_step();
        const std::vector<DropCase> drops = every_drop(size);
        for (std::size_t i = setting.first; i < drops.size(); i += setting.stride) {
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
                    Setting{{3, 1}}, Setting{{2, 2}},
                    Setting{.shape = {2, 2}, .dtype = Dtype::kF16, .first = 2},
                    Setting{{1, 3}, Dtype::kF16},
                    Setting{{2, 2}, Dtype::kBf16, TransportChoice::kTcp, Backwards::kOne, 4},
                    Setting{.shape = {2, 2}, .backwards = Backwards::kMany, .first = 6}),
    [](const auto& row) {
      return to_string(row.param.shape) + "_" + std::string(name(row.param.dtype)) +
             (row.param.transport == TransportChoice::kTcp ? "_tcp" : "") +
             (row.param.backwards == Backwards::kMany ? "_many" : "");
    });

// While the other ranks add locally they post no status word. The rank that dropped waits for
// theirs in its next step.
TEST(DropBeforeALocalWindow, OutlivesTheTimeout) {
  const StepCase step = random_step(small_parameters(Dtype::kF32), 2, {Sync::kAll}, 3);
  constexpr std::chrono::milliseconds kTimeout{300};
  const auto run = [&](Reducer& reducer, const Mesh& mesh) {
    if (mesh.rank() == 1) {
      reducer.begin_step();
      reducer.abandon_step("before a long window");
    } else {
      run_microbatch(reducer, step, 0, 0, {.sync = Sync::kNone});
      std::this_thread::sleep_for(3 * kTimeout);
      run_microbatch(reducer, step, 0, 0, {.sync = Sync::kNone});
      EXPECT_THROW(reducer.finish(), StepAbortedError);
    }
    run_step(reducer, step, mesh.rank());
  };
  expect_result({1, 2}, step, {}, run, {.timeout = kTimeout});
}

// It reads nothing from other ranks, so it does not wait for them.
TEST(DropBeforeALocalWindow, LeavesFoundInfAtOnce) {
  const StepCase step = random_step(small_parameters(Dtype::kF32), 2, {Sync::kAll}, 3);
  std::latch asked(1);
  run_reducers({1, 2}, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.begin_step();
    if (mesh.rank() == 1) {
      reducer.abandon_step("before anything");
      EXPECT_FALSE(reducer.found_inf());
      asked.count_down();
    } else {
      asked.wait();
      EXPECT_THROW(run_step(reducer, step, 0), StepAbortedError);
    }
  });
}

// The other ranks learn of it in their next microbatch, not from a timeout.
TEST(DropAtTheEnd, OfAPendingStepIsHeard) {
  const StepCase step =
      random_step(small_parameters(Dtype::kF32), 4, {Sync::kShard, Sync::kAll}, 3);
  for (const bool closes : {false, true}) {
    const auto start = std::chrono::steady_clock::now();
    const auto run = [&](Reducer& reducer, const Mesh& mesh) {
      SCOPED_TRACE(closes ? "closed" : "destroyed");
      run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kShard});
      if (mesh.rank() == 2) {
        if (closes) reducer.close();
        return;
      }
      const auto go_on = [&] {
        run_microbatch(reducer, step, 1, mesh.rank(), {.sync = Sync::kAll});
        static_cast<void>(reducer.shard("a"));
      };
      EXPECT_THAT(caught<StepAbortedError>(go_on), names({2}));
    };
    run_reducers(kSquare, step, {.bucket_bytes = 128}, run, kPatient);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30)) << "by a timeout";
  }
}

// A rank that never comes holds up another rank's destructor for the timeout at most.
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

// A gradient that is never ready to be packed.
class NeverProduced : public Event::State {
 public:
  [[nodiscard]] bool complete() const override { return false; }
  void wait() const override { throw Error("test: this gradient cannot be made"); }
};

TEST(DropReason, OfAFaultMayBeEmpty) {
  const StepCase step = random_step(small_parameters(Dtype::kF32), 2, {Sync::kNone, Sync::kAll}, 3);
  for (const Sync sync : {Sync::kNone, Sync::kAll}) {
    run_reducers({2, 1}, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
      const auto run = [&] {
        Microbatch open(reducer, {.sync = sync});
        const std::vector<StoredGradient> stored = deliver(reducer, step, 0, mesh.rank());
        if (mesh.rank() == 1) reducer.reject_gradient("");
        open.end();
        reducer.finish();
      };
      if (mesh.rank() == 0) {
        EXPECT_THROW(run(), StepAbortedError);
      } else {
        EXPECT_THROW(run(), UsageError);
      }
    });
  }
}

TEST(FailedPack, DropsTheStepEverywhere) {
  const StepCase step =
      random_step(small_parameters(Dtype::kF32), 4, {Sync::kNone, Sync::kShard, Sync::kAll}, 3);
  for (int bad_microbatch = 0; bad_microbatch < 3; ++bad_microbatch) {
    expect_result(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
      const auto run = [&] {
        for (int m = 0; m < 3; ++m) {
          std::vector<StoredGradient> stored;
          Microbatch open(reducer, {.sync = step.schedule[static_cast<std::size_t>(m)]});
          for (std::size_t p = 0; p < step.parameters.size(); ++p) {
            stored.push_back(gradient_of(step, p, m, mesh.rank()));
            const bool bad = p == 0 && m == bad_microbatch && mesh.rank() == 3;
            reducer.gradient_ready(static_cast<int>(p), stored.back().view(), {},
                                   bad ? Event(std::make_shared<NeverProduced>()) : Event());
          }
          open.end();
        }
        reducer.finish();
      };
      if (mesh.rank() == 3) {
        EXPECT_THAT(caught<Error>(run), says("test: this gradient cannot be made"));
      } else {
        EXPECT_THAT(caught<StepAbortedError>(run),
                    names({3}, testing::HasSubstr("cannot be made")));
      }
      run_step(reducer, step, mesh.rank());
      EXPECT_EQ(reducer.state().step, 1);
    });
  }
}

std::vector<ParameterSpec> vectors(int count, std::int64_t size) {
  std::vector<ParameterSpec> parameters;
  for (int p = 0; p < count; ++p)
    parameters.push_back({.name = std::to_string(p), .shape = {size}});
  return parameters;
}

// A gradient that waits for staging is released, not packed: an error of the pack could no longer
// be reported. Here the last bucket of the previous microbatch keeps the staging until the other
// rank has sent it too.
TEST(DropWithKeptGradients, DoesNotPackThem) {
  const StepCase step = random_step(vectors(4, 16), 2, {Sync::kShard, Sync::kAll}, 3);
  std::latch kept(1);
  expect_result({1, 2}, step, {.bucket_bytes = 64}, [&](Reducer& reducer, const Mesh& mesh) {
    if (mesh.rank() == 1) {
      run_microbatch(reducer, step, 0, 1, {.sync = Sync::kShard});
      reducer.begin_microbatch({.sync = Sync::kAll});
      const StoredGradient gradient = gradient_of(step, 0, 1, 1);
      reducer.gradient_ready("0", gradient.view(), {}, Event(std::make_shared<NeverProduced>()));
      kept.count_down();
      reducer.abandon_step("of this rank's own");
    } else {
      const auto run = [&] {
        std::vector<StoredGradient> stored;
        Microbatch open(reducer, {.sync = Sync::kShard});
        for (std::size_t p = 0; p < 4; ++p) {
          if (p == 3) kept.wait();
          stored.push_back(gradient_of(step, p, 0, 0));
          reducer.gradient_ready(static_cast<int>(p), stored.back().view());
        }
        open.end();
        run_microbatch(reducer, step, 1, 0, {.sync = Sync::kAll});
        reducer.finish();
      };
      EXPECT_THAT(caught<StepAbortedError>(run), names({1}));
    }
    run_step(reducer, step, mesh.rank());
  });
}

// Tells the test as soon as a thread waits for it.
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

// A gradient that finds no staging is added to its local sum on the thread that brings it.
// Meanwhile another thread drops the step and has to wait for that addition.
TEST(DropWithAGradientUnderWay, WaitsUntilItHasJoinedTheLocalSum) {
  const StepCase step = random_step(vectors(8, 16), 2, {Sync::kNone, Sync::kShard, Sync::kAll}, 3);
  expect_result({1, 2}, step, {.bucket_bytes = 64}, [&](Reducer& reducer, const Mesh& mesh) {
    if (mesh.rank() == 1) {
      run_microbatch(reducer, step, 0, 1, {.sync = Sync::kNone});
      std::latch awaited(1);
      std::latch produced(1);
      const StoredGradient gradient = gradient_of(step, 7, 1, 1);
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
      const auto run = [&] {
        run_schedule(reducer, step, 0);
        reducer.finish();
      };
      EXPECT_THROW(run(), StepAbortedError);
    }
    run_step(reducer, step, mesh.rank());
  });
}

// A gradient that comes too late is ignored: it is not read once abandon_step() has returned.
TEST(DropWithGradientsOfOtherThreads, ReadsNoneAfterwards) {
  const StepCase step = random_step(vectors(12, 37), 2, {Sync::kNone, Sync::kShard, Sync::kAll}, 5);
  const auto drop_in_between = [&](Reducer& reducer, int m, int rank, int wanted) {
    reducer.begin_microbatch({.sync = step.schedule[static_cast<std::size_t>(m)]});
    std::vector<StoredGradient> stored;
    for (std::size_t p = 0; p < 12; ++p) stored.push_back(gradient_of(step, p, m, rank));
    std::atomic<int> arrived{0};
    std::thread backward([&] {
      try {
        for (std::size_t p = 0; p < stored.size(); ++p, ++arrived) {
          reducer.gradient_ready(static_cast<int>(p), stored[p].view());
        }
      } catch (const UsageError&) {  // no microbatch is open any more
      }
    });
    while (arrived < wanted) std::this_thread::yield();
    reducer.abandon_step("in between");
    for (StoredGradient& gradient : stored) gradient.poison();
    backward.join();
  };
  const auto run = [&](Reducer& reducer, const Mesh& mesh) {
    const int rank = mesh.rank();
    for (int round = 0; round < 60; ++round) {
      const int dropped = round / 2 % 3;
      if (rank == round % 2) {
        for (int m = 0; m < dropped; ++m) {
          run_microbatch(reducer, step, m, rank,
                         {.sync = step.schedule[static_cast<std::size_t>(m)]});
        }
        drop_in_between(reducer, dropped, rank, round % 12);
      } else {
        const auto all = [&] {
          run_schedule(reducer, step, rank);
          reducer.finish();
        };
        EXPECT_THROW(all(), StepAbortedError);
      }
    }
    run_step(reducer, step, rank);
  };
  for (const MeshShape shape : {MeshShape{1, 2}, MeshShape{2, 1}}) {
    expect_result(shape, step, {.bucket_bytes = 128}, run, kPatient);
  }
}

}  // namespace
}  // namespace hsdp
