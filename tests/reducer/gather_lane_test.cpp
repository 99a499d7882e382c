// A lane for gathers beside a Reducer: the bits are the same as without it, neither waits for the
// other, and all ranks learn of a failure.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <latch>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/world.h"
#include "hsdp/error.h"
#include "hsdp/reducer/lane.h"
#include "hsdp/reducer_internal.h"
#include "tests/support/gather_steps.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::HasSubstr;
using SteadyClock = std::chrono::steady_clock;

// Long, as no rank may learn of a peer's failure from a timeout.
constexpr ThreadRanksOptions kLongTimeout{.timeout = std::chrono::seconds(60),
                                          .deadline = std::chrono::seconds(90)};

StepCase gathered_step(MeshShape shape) {
  std::vector<ParameterSpec> parameters = odd_parameters(Dtype::kF32);
  for (int p = 0; p < 6; ++p) {
    parameters.push_back({.name = "more" + std::to_string(p), .shape = {40 + p, 7}});
  }
  return random_step(std::move(parameters), shape.size(), {Sync::kShard, Sync::kNone, Sync::kAll},
                     21);
}

// An Event that completes when the test decides.
class Gate {
 public:
  Gate() {
    stream_.run([this] { open_.get_future().wait(); });
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  [[nodiscard]] Event passed() { return stream_.record(); }
  void open() {
    if (!std::exchange(is_open_, true)) open_.set_value();
  }

 private:
  std::promise<void> open_;
  bool is_open_ = false;
  Stream stream_ = Stream::host_worker("gate");
};

// One unit of 2,000 elements. Each rank's slice holds its shard rank.
class OneUnit {
 public:
  explicit OneUnit(Reducer& reducer, const Mesh& mesh) : values_(2'000, -1.0F) {
    cut_ = RowCut(std::ssize(values_), mesh.shard_size());
    begin_ = cut_->begin(mesh.shard_rank());
    std::fill_n(values_.begin() + begin_, cut_->length(mesh.shard_rank()),
                static_cast<float>(mesh.shard_rank()));
    lane_ = ReducerInternal(reducer).make_lane("unit");
  }
  Event start(const Event& updated) {
    return lane_->run(updated, [this](Communicator& shard_group, Stream& stream) {
      const TensorView whole{values_.data(), std::ssize(values_), Dtype::kF32, {}};
      shard_group.all_gather(whole.slice(begin_, cut_->length(shard_group.rank())), whole, stream);
    });
  }
  void expect_whole() const {
    for (int r = 0; r < cut_->size(); ++r) {
      if (cut_->length(r) > 0) {
        EXPECT_EQ(values_[static_cast<std::size_t>(cut_->begin(r))], static_cast<float>(r));
      }
    }
  }
  [[nodiscard]] bool is_whole_of_others(int shard_rank) const {
    return values_[static_cast<std::size_t>(cut_->begin(1 - shard_rank))] >= 0;
  }
  void destroy() { lane_.reset(); }
  [[nodiscard]] GatherLane& lane() { return *lane_; }

 private:
  Values values_;
  std::optional<RowCut> cut_;
  std::int64_t begin_ = 0;
  std::unique_ptr<GatherLane> lane_;
};

class GatherBeside : public testing::TestWithParam<MeshShape> {};

TEST_P(GatherBeside, ManyStepsHaveTheBitsOfGatherParameters) {
  const MeshShape shape = GetParam();
  const StepCase step = gathered_step(shape);
  for (const TransportChoice transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
    for (const Layout layout : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
      std::vector<std::vector<Values>> parameters(static_cast<std::size_t>(shape.size()));
      const auto run = [&](Reducer& reducer, const Mesh& mesh) {
        GatherSteps steps = gather_steps_on_host(reducer, step, mesh.rank());
        steps.count = 12;
        parameters[static_cast<std::size_t>(mesh.rank())] =
            run_gather_steps(reducer, step, mesh, steps);
      };
      run_reducers(shape, step, {.layout = layout, .bucket_bytes = 1 << 10}, run,
                   {.transport = transport});
      for (const auto& of_rank : parameters) EXPECT_EQ(of_rank, parameters.front());
    }
  }
}

TEST_P(GatherBeside, ALateUpdateHoldsUpNoMicrobatch) {
  const MeshShape shape = GetParam();
  const StepCase step = gathered_step(shape);
  expect_result(shape, step, {.bucket_bytes = 1 << 10}, [&](Reducer& reducer, const Mesh& mesh) {
    Gate gate;
    OneUnit unit(reducer, mesh);
    const Event gathered = unit.start(gate.passed());
    run_step(reducer, step, mesh.rank());
    EXPECT_FALSE(gathered.complete());
    gate.open();
    gathered.wait();
    unit.expect_whole();
  });
}

TEST_P(GatherBeside, ALateGradientHoldsUpNoGather) {
  const MeshShape shape = GetParam();
  const StepCase step = gathered_step(shape);
  std::latch gathered_everywhere(shape.size());
  expect_result(shape, step, {.bucket_bytes = 1 << 10}, [&](Reducer& reducer, const Mesh& mesh) {
    OneUnit unit(reducer, mesh);
    const auto late = [&] {  // the other ranks' buckets wait for this rank's gradients
      if (mesh.rank() == 0) gathered_everywhere.wait();
      const auto stored = deliver(reducer, step, 0, mesh.rank());
      unit.start({}).wait();
      unit.expect_whole();
      reducer.end_microbatch();
    };
    reducer.begin_microbatch({.sync = step.schedule[0]});
    if (mesh.rank() == 0) {
      unit.start({}).wait();
      unit.expect_whole();
      gathered_everywhere.count_down();
      late();
    } else {
      const auto stored = deliver(reducer, step, 0, mesh.rank());
      unit.start({}).wait();
      gathered_everywhere.count_down();
      unit.start({}).wait();
      reducer.end_microbatch();
    }
    for (int m = 1; m < 3; ++m) {
      run_microbatch(reducer, step, m, mesh.rank(),
                     {.sync = step.schedule[static_cast<std::size_t>(m)]});
    }
  });
}

TEST_P(GatherBeside, AnErrorInATaskReachesAllRanksWithItsText) {
  const MeshShape shape = GetParam();
  const StepCase step = gathered_step(shape);
  const auto run = [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 1 << 10});
    register_all(reducer, step);
    run_step(reducer, step, mesh.rank());
    OneUnit unit(reducer, mesh);
    unit.start({}).wait();
    static_cast<void>(mesh.world().exchange("", "ready"));
    const auto from = SteadyClock::now();
    const bool bad = mesh.rank() == shape.size() - 1;
    const Event broken =
        bad ? unit.lane().run({},
                              [](Communicator&, Stream&) {
                                throw std::runtime_error("no memory for the parameters");
                              })
            : unit.start({});
    const Event later = unit.start({});
    // In other shard groups a gather may have ended before the failure is known.
    const bool meets_it = mesh.replica() == mesh.replicate_size() - 1;
    const auto error = caught<std::exception>([&] { broken.wait(); });
    if (meets_it) {
      ASSERT_TRUE(error);
    }
    const auto run_on = [&] {
      for (;;) run_step(reducer, step, mesh.rank());
    };
    EXPECT_THAT(caught<Error>(run_on), says(HasSubstr("no memory for the parameters")));
    if (meets_it) {
      EXPECT_TRUE(caught<std::exception>([&] { later.wait(); }));
    }
    try {
      unit.start({}).wait();
      ADD_FAILURE() << "expected the world's failure";
    } catch (const std::exception& again) {
      EXPECT_THAT(again.what(), HasSubstr("no memory for the parameters"));
    }
    EXPECT_LT(SteadyClock::now() - from, std::chrono::seconds(2));
  };
  run_mesh(shape, run, kLongTimeout);
}

TEST_P(GatherBeside, ALaneMayGoWhileItsTasksAreUnderWay) {
  const MeshShape shape = GetParam();
  const StepCase step = gathered_step(shape);
  run_mesh(shape, [&](const Mesh& mesh) {
    Gate gate;
    std::optional<Reducer> reducer(std::in_place, mesh, ReducerOptions{.bucket_bytes = 1 << 10});
    register_all(*reducer, step);
    for (int repeat = 0; repeat < 3; ++repeat) {
      OneUnit unit(*reducer, mesh);
      const Event first = unit.start({});
      const Event last = unit.start({});
      if (repeat == 1) run_step(*reducer, step, mesh.rank());
      unit.destroy();
      EXPECT_TRUE(first.complete() && last.complete());
      unit.expect_whole();
    }
    OneUnit unit(*reducer, mesh);
    const Event held = unit.start(gate.passed());
    reducer->close();
    reducer.reset();
    gate.open();
    unit.destroy();
    held.wait();
    unit.expect_whole();
  });
}

TEST_P(GatherBeside, ALaneGoesAfterAPeerHasFailed) {
  const MeshShape shape = GetParam();
  const auto run = [&](const Mesh& mesh) {
    const auto from = SteadyClock::now();
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {100}});
    OneUnit unit(reducer, mesh);
    if (mesh.rank() == 0) {
      Communicator(mesh.world()).abort("the test wants it");
    } else {
      for (int i = 0; i < 3; ++i) unit.start({});
    }
    unit.destroy();
    EXPECT_LT(SteadyClock::now() - from, std::chrono::seconds(2));
  };
  run_mesh(shape, run, kLongTimeout);
}

INSTANTIATE_TEST_SUITE_P(Meshes, GatherBeside,
                         testing::Values(MeshShape{1, 2}, MeshShape{2, 2}, MeshShape{3, 2},
                                         MeshShape{1, 3}, MeshShape{2, 1}),
                         [](const auto& row) { return to_string(row.param); });

// All ranks of the step skip the gathers that were to follow it.
TEST(GatherAfterADroppedStep, IsSkippedAndTheLaneGoesOn) {
  const StepCase step = gathered_step(kSquare);
  run_reducers(kSquare, step, {.bucket_bytes = 1 << 10}, [&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, step, mesh.rank());
    OneUnit unit(reducer, mesh);
    Stream own = Stream::host_worker("own");
    double norm = 0;
    bool told = false;  // whether a call has raised the drop
    const auto result_of_dropped_step = [&]() -> Event {
      try {
        std::vector<StoredGradient> stored;  // outlives the microbatch, which reads it
        Microbatch open(reducer, {.last = true});
        stored = deliver(reducer, step, 0, mesh.rank());
        if (mesh.rank() == 1) throw StepAbortedError("dropped here", {1});
        open.end();
        return reducer.grad_norm({&norm, 1, Dtype::kF64, {}});
      } catch (const StepAbortedError&) {
        told = true;
        own.run([error = std::current_exception()] { std::rethrow_exception(error); });
        return own.record();
      }
    };
    const Event norm_known = result_of_dropped_step();
    EXPECT_THROW(unit.start(norm_known).wait(), StepAbortedError);
    EXPECT_FALSE(unit.is_whole_of_others(mesh.shard_rank()));
    unit.start({}).wait();
    unit.expect_whole();
    if (!told) {
      EXPECT_THROW(reducer.finish(), StepAbortedError);
    }
    run_step(reducer, step, mesh.rank());
  });
}

class LaneErrors : public testing::TestWithParam<bool> {};

// If the thread dropped its tasks silently, all other ranks would wait for them.
TEST_P(LaneErrors, FailTheReducer) {
  const Communicator world = in_process_world(1).front();
  reducer::Outcome outcome(world);
  std::shared_ptr<IssueOrder::Issuer> issuer;  // of the mesh; on a GPU it issues the tasks
  if (GetParam()) issuer = IssueOrder::of(world)->add_issuer();
  reducer::Lane lane("lane", {}, outcome, issuer);
  lane.issue({.run = [] { throw std::runtime_error("of the task"); }});
  bool ran = false;
  lane.issue({.run = [&ran] { ran = true; }});
  lane.synchronize();
  EXPECT_TRUE(ran);
  EXPECT_TRUE(outcome.failed());
  EXPECT_THAT(caught<std::runtime_error>([&] { outcome.rethrow_failure("test"); }),
              says("of the task"));
}

INSTANTIATE_TEST_SUITE_P(Threads, LaneErrors, testing::Bool(),
                         [](const auto& test) { return test.param ? "OfTheMesh" : "OfTheLane"; });

TEST(MakeLane, OfAnotherNameIsAnErrorOnAllRanks) {
  run_mesh({1, 3}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    const auto run_on = [&] {
      static_cast<void>(ReducerInternal(reducer).make_lane(mesh.rank() == 2 ? "b" : "a"));
    };
    EXPECT_THAT(
        caught<MismatchError>(run_on),
        names({2},
              HasSubstr("expected 'make lane 'a'' on every rank, got 'make lane 'b'' on rank 2")));
    OneUnit unit(reducer, mesh);
    unit.start({}).wait();
    unit.expect_whole();
  });
}

TEST(MakeLane, InAMicrobatchOfOneRankIsAnErrorOnAllRanks) {
  const StepCase step = gathered_step({1, 2});
  run_reducers({1, 2}, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.prepare();
    if (mesh.rank() == 1) reducer.begin_microbatch({.sync = Sync::kNone});
    const auto make = [&] { static_cast<void>(ReducerInternal(reducer).make_lane("gather")); };
    if (mesh.rank() == 1) {
      EXPECT_THROW(make(), UsageError);
    } else {
      EXPECT_THAT(caught<StepAbortedError>(make),
                  says(HasSubstr("rank 1 of 2 could not make lane 'gather'")));
      reducer.begin_microbatch({.sync = Sync::kNone});
    }
    const auto stored = deliver(reducer, step, 0, mesh.rank());
    reducer.end_microbatch();
    make();
  });
}

}  // namespace
}  // namespace hsdp
