// The Reducer on the NCCL engine, over the stand-ins for libnccl and the CUDA runtime: bits and
// failures.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "capture.h"
#include "cuda_stand_in.h"
#include "gpu_rank.h"
#include "hsdp/device/host_event.h"
#include "hsdp/error.h"
#include "hsdp/reducer_internal.h"
#include "nccl_ranks.h"
#include "tests/support/failing_calls.h"
#include "tests/support/gather_steps.h"
#include "tests/support/step_drops.h"
#include "tests/support/wide_step.h"

namespace hsdp::test {
namespace {

using stand_in::NcclCall;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Plan {
  const char* name;
  std::vector<Sync> schedule;
  bool finish = false;
  ReducerOptions options{};
};

std::vector<Plan> plans() {
  constexpr Sync none = Sync::kNone;
  constexpr Sync shard = Sync::kShard;
  constexpr Sync all = Sync::kAll;
  return {{"last", {shard, shard, all}},
          {"finished", {shard, shard}, true},
          {"local", {none, none, all}},
          {"local_then_finished", {none, shard, none}, true},
          {"dim0", {shard, none, all}, false, {.layout = Layout::kDim0}},
          {"whole", {shard, none, all}, false, {.layout = Layout::kWhole}},
          {"over_the_mesh", {shard, none, all}, false, {.shard_over = ShardOver::kMesh}},
          {"over_the_mesh_whole",
           {none, shard},
           true,
           {.layout = Layout::kWhole, .shard_over = ShardOver::kMesh}},
          {"many_backwards", {shard, none, all}, false, {.backwards = Backwards::kMany}},
          {"param_accumulators",
           {none, shard, none, all},
           false,
           {.accumulate_dtype = AccumulateDtype::kParam}},
          {"f32_wire", {shard, all}, false, {.reduce_dtype = Dtype::kF32}}};
}

class OnNccl : public ::testing::TestWithParam<MeshShape> {};

TEST_P(OnNccl, ExactStepsHaveTheBitsOfTheReference) {
  const MeshShape shape = GetParam();
  std::uint64_t seed = 40;
  for (Plan plan : plans()) {
    plan.options.bucket_bytes = kSmallBuckets;
    for (const Dtype dtype : kDtypes) {
      StepCase step = random_step(parameters(dtype), shape.size(), plan.schedule, ++seed);
      step.finish = plan.finish;
      const auto results = nccl_results(shape, [&](const Mesh& mesh) {
        Reducer reducer(mesh, plan.options);
        GpuRank rank(reducer, step, mesh);
        static_cast<void>(rank.run_step());
        RankResult result = rank.run_step();
        EXPECT_FALSE(reducer.found_inf());
        EXPECT_EQ(reducer.stats().engine, "nccl");
        EXPECT_EQ(reducer.stats().reduction, "exact");
        return result;
      });
      expect_reference(results, step, plan.options, shape,
                       std::string(plan.name) + " " + std::string(name(dtype)));
    }
  }
}

TEST_P(OnNccl, GradientsOfF64StayF64) {
  for (const char* reduction : {"exact", "native"}) {
    run_nccl_mesh(GetParam(), [&](const Mesh& mesh) {
      expect_wide_step(mesh, {.bucket_bytes = kSmallBuckets, .reduction = reduction},
                       {Sync::kShard, std::nullopt, Sync::kNone, Sync::kAll});
    });
  }
}

TEST_P(OnNccl, GathersUnderMicrobatchesHaveTheBitsOfGatherParameters) {
  const MeshShape shape = GetParam();
  const StepCase step = random_step(parameters(Dtype::kF32), shape.size(),
                                    {Sync::kShard, Sync::kNone, Sync::kAll}, 61);
  std::vector<std::vector<Values>> gathered(static_cast<std::size_t>(shape.size()));
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
    GatherSteps steps{.count = 6};
    steps.microbatch = [&](int m, const std::function<void()>& inside) {
      rank.begin(static_cast<std::size_t>(m));
      rank.hand_over_all(static_cast<std::size_t>(m));
      inside();
      reducer.end_microbatch();
    };
    steps.shards = [&] { return rank.read().shards; };
    gathered[static_cast<std::size_t>(mesh.rank())] = run_gather_steps(reducer, step, mesh, steps);
  });
  for (const auto& of_rank : gathered) EXPECT_EQ(of_rank, gathered.front());
}

TEST_P(OnNccl, NativeSumsOfIntegersAreExactToo) {
  const MeshShape shape = GetParam();
  for (const Layout layout : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
      const StepCase step = integer_step(parameters(dtype), shape.size(), 2, 7);
      const ReducerOptions exact{.replica_dtype = Dtype::kF32, .layout = layout};
      ReducerOptions options = exact;
      options.bucket_bytes = kSmallBuckets;
      options.reduction = "native";
      const auto results = nccl_results(shape, [&](const Mesh& mesh) {
        Reducer reducer(mesh, options);
        GpuRank rank(reducer, step, mesh);
        RankResult result = rank.run_step();
        EXPECT_EQ(reducer.stats().reduction, "native");
        int native = 0;
        for (const NcclCall& call : nccl_stand_in().calls(mesh.rank())) {
          EXPECT_TRUE(call.name != "send" && call.name != "recv") << call.name;
          native += call.name == "reduce_scatter" || call.name == "all_reduce" ? 1 : 0;
        }
        // Rows without elements, which a rank without any whole parameter in a bucket has, need no
        // memory.
        std::int64_t empty_rows = 0;
        const BucketLayout& placed = reducer.layout();
        for (int b = 0; b < std::ssize(placed.buckets()); ++b) {
          empty_rows += placed.rows(b).length(mesh.shard_rank()) == 0 ? 1 : 0;
        }
        if (shape.replicate == 1) empty_rows = 0;
        const ReducerStats stats = reducer.stats();
        EXPECT_EQ(native + empty_rows, stats.reduce_scatter_count + stats.all_reduce_count);
        return result;
      });
      expect_reference(results, step, exact, shape, "native " + std::string(name(dtype)));
    }
  }
}

TEST_P(OnNccl, TheHostDoesNotWaitForTheGpu) {
  const MeshShape shape = GetParam();
  const StepCase step = random_step(parameters(Dtype::kBf16), shape.size(),
                                    {Sync::kShard, Sync::kShard, Sync::kAll}, 5);
  const auto results = nccl_results(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
    static_cast<void>(rank.run_step());  // takes the memory that steps need
    static_cast<void>(mesh.world().exchange("", "ready"));
    RankResult result;
    {
      const stand_in::Standstill nothing_moves;
      rank.run();
      rank.run();
      rank.enqueue_read(result);
      EXPECT_FALSE(rank.stream().record().complete());
      EXPECT_FALSE(reducer.packed().complete());
    }
    rank.stream().synchronize();
    return result;
  });
  expect_reference(results, step, {}, shape, "standing still");
}

// Every seventh case, as the host's test runs all of them.
TEST_P(OnNccl, ADroppedStepLeavesAllRanksUsable) {
  const MeshShape shape = GetParam();
  const StepCase step = random_step({{.name = "a", .shape = {13, 5}}, {.name = "b", .shape = {70}}},
                                    shape.size(), std::vector<Sync>(5), 9);
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 128});
    GpuRank rank(reducer, step, mesh);
    const auto microbatch = [&](int m, Sync sync) {
      Microbatch open(reducer, {.sync = sync});
      for (const std::size_t p : {1U, 0U}) rank.hand_over(p, static_cast<std::size_t>(m));
      open.end();
    };
    const DropActions actions{.microbatch = microbatch,
                              .broken_microbatch =
                                  [&](int m, Sync sync) {
                                    const Microbatch open(reducer, {.sync = sync});
                                    rank.hand_over(1, static_cast<std::size_t>(m));
                                    throw OwnError();
                                  },
                              .clean_step =
                                  [&] {
                                    microbatch(0, Sync::kNone);
                                    microbatch(1, Sync::kShard);
                                    microbatch(2, Sync::kAll);
                                    return rank.read().shards;
                                  }};
    const std::vector<Values> expected = actions.clean_step();
    const std::vector<DropCase> drops = every_drop(shape.size());
    for (std::size_t i = 0; i < drops.size(); i += 7) {
      run_drop(reducer, actions, drops[i], mesh.rank(), expected);
      if (HasFailure()) throw std::runtime_error("enough failures");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, OnNccl,
                         ::testing::Values(MeshShape{1, 2}, MeshShape{2, 1}, MeshShape{2, 2},
                                           MeshShape{1, 3}, MeshShape{1, 1}),
                         ::testing::PrintToStringParamName());

// The issuing thread must not wait for something that it has to issue itself.
TEST(NcclGatherLane, ATaskMayComeAfterThatOfAnotherLane) {
  run_nccl_mesh({1, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {4096}});
    const std::unique_ptr<GatherLane> first = ReducerInternal(reducer).make_lane("first");
    const std::unique_ptr<GatherLane> second = ReducerInternal(reducer).make_lane("second");
    std::vector<float> ranks(4, static_cast<float>(mesh.rank()));
    const auto gather = [&](std::size_t begin) {
      const TensorView whole{ranks.data() + begin, 2, Dtype::kF32, mesh.device()};
      return [whole](Communicator& shard_group, Stream& stream) {
        shard_group.all_gather(whole.slice(shard_group.rank(), 1), whole, stream);
      };
    };
    for (int repeat = 0; repeat < 10; ++repeat) {
      const Event one = first->run({}, gather(0));
      const Event two = second->run(one, gather(2));
      first->run(two, gather(0)).wait();
      EXPECT_TRUE(one.complete() && two.complete());
    }
    EXPECT_EQ(ranks, (std::vector<float>{0, 1, 0, 1}));
  });
}

TEST(NcclGatherLane, AnErrorInATaskReachesAllRanksWithItsText) {
  const StepCase step = integer_step({{.name = "w", .shape = {4096}}}, 4, 1, 3);
  // A peer's GPU may still read it after the peer has given up.
  std::vector<std::vector<float>> memory(4, std::vector<float>(2));
  run_nccl_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    GpuRank rank(reducer, step, mesh);
    static_cast<void>(rank.run_step());
    const std::unique_ptr<GatherLane> lane = ReducerInternal(reducer).make_lane("gather");
    std::vector<float>& ranks = memory[static_cast<std::size_t>(mesh.rank())];
    std::ranges::fill(ranks, static_cast<float>(mesh.rank()));
    const TensorView whole{ranks.data(), 2, Dtype::kF32, mesh.device()};
    const auto gather = [whole](Communicator& shard_group, Stream& stream) {
      shard_group.all_gather(whole.slice(shard_group.rank(), 1), whole, stream);
    };
    lane->run({}, gather).wait();
    static_cast<void>(mesh.world().exchange("", "ready"));
    const auto from = std::chrono::steady_clock::now();
    const Event broken =
        mesh.rank() != 3 ? lane->run({}, gather) : lane->run({}, [](Communicator&, Stream&) {
          throw std::runtime_error("no memory for it");
        });
    if (mesh.rank() == 3) {
      EXPECT_THAT([&] { broken.wait(); }, ThrowsMessage<std::runtime_error>("no memory for it"));
    }
    const auto fails = [&] {
      for (;;) static_cast<void>(rank.run_step());
    };
    EXPECT_THAT(fails, ThrowsMessage<Error>(HasSubstr("no memory for it")));
    EXPECT_THAT([&] { lane->run({}, gather).wait(); },
                ThrowsMessage<std::exception>(HasSubstr("no memory for it")));
    EXPECT_LT(std::chrono::steady_clock::now() - from, std::chrono::seconds(10));
  });
}

TEST(NcclReducerFailure, AHopThatHangsIsNamedAndTheLastResultStays) {
  const StepCase step = integer_step({{.name = "w", .shape = {4096}}}, 4, 1, 3);
  std::vector<RankResult> before(4);
  run_nccl_mesh(kSquare,
                [&](const Mesh& mesh) {
                  Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
                  GpuRank rank(reducer, step, mesh);
                  before[static_cast<std::size_t>(mesh.rank())] = rank.run_step();
                  static_cast<void>(reducer.found_inf());
                  static_cast<void>(mesh.world().exchange("", "ready"));
                  nccl_stand_in().hang(3);
                  const auto fails = [&] {
                    rank.run();
                    static_cast<void>(reducer.found_inf());
                  };
                  EXPECT_THAT(fails, ThrowsMessage<TimeoutError>(HasSubstr("of bucket ")));
                  EXPECT_THROW(static_cast<void>(reducer.shard("w")), TimeoutError);
                  EXPECT_THROW(reducer.begin_microbatch(), TimeoutError);
                  EXPECT_EQ(reducer.stats().step_count, 2);
                },
                {.timeout = std::chrono::milliseconds(3'000)});
  expect_reference(before, step, {}, kSquare, "before");
}

// The host does not know of the failure yet when it enqueues work that reads the result.
TEST(NcclReducerFailure, AResultOfAnAbortedHopIsNaN) {
  const StepCase step = integer_step({{.name = "w", .shape = {4096}}}, 4, 1, 3);
  for (const int hanging : {0, 3}) {
    const auto errors = try_nccl_ranks(4, [&](Communicator& world) {
      const Mesh mesh = mesh_of(world, kSquare);
      Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
      GpuRank rank(reducer, step, mesh);
      static_cast<void>(rank.run_step());
      static_cast<void>(mesh.world().exchange("", "ready"));
      nccl_stand_in().hang(hanging);
      rank.run();
      RankResult result;
      rank.enqueue_read(result);
      static_cast<void>(mesh.world().exchange("", "issued"));
      if (mesh.rank() == 1) world.abort("the test wants it");
      rank.stream().synchronize();
      for (const float value : result.shards[0]) EXPECT_TRUE(std::isnan(value));
      static_cast<void>(reducer.found_inf());
    });
    for (const auto& error : errors) EXPECT_TRUE(error);
  }
}

TEST(NcclReducerFailure, AResultThatStoodBeforeTheFailureIsRead) {
  const StepCase step = integer_step({{.name = "w", .shape = {4096}}}, 2, 1, 3);
  std::latch ready(2);
  const auto results = nccl_results({1, 2}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {});
    GpuRank rank(reducer, step, mesh);
    static_cast<void>(rank.run_step());
    static_cast<void>(reducer.found_inf());
    ready.arrive_and_wait();
    mesh.world().abort("the test wants it");
    while (!control_of(mesh.world())->failed()) std::this_thread::yield();
    RankResult result = rank.read();
    const auto next_step = [&] {
      rank.run();
      static_cast<void>(reducer.found_inf());
    };
    EXPECT_THROW(next_step(), RankError);
    EXPECT_NO_THROW(reducer.close());
    return result;
  });
  expect_reference(results, step, {}, {1, 2}, "kept");
}

// The plain hop, after which the device waits for that event.
class HeldHop final : public ReplicaHop {
 public:
  explicit HeldHop(Event until) : until_(std::move(until)) {}
  [[nodiscard]] std::string describe() const override { return "held"; }
  [[nodiscard]] bool has_state() const override { return false; }
  void prepare(const HopPlan& plan) override { plain_.prepare(plan); }
  void bind(Communicator scatter, Communicator gather) override {
    plain_.bind(std::move(scatter), std::move(gather));
  }
  Event reduce(const HopBucket& bucket, Stream& stream) override {
    Event done = plain_.reduce(bucket, stream);
    stream.wait(until_);
    return done;
  }

 private:
  Event until_;
  PlainHop plain_;
};

// To this rank's device, a hop that a peer aborted looks like one that has ended.
TEST(NcclReducerFailure, AResultThatAPeerDoesNotHaveIsNone) {
  const StepCase step = integer_step({{.name = "w", .shape = {4096}}}, 2, 1, 3);
  const auto rest = std::make_shared<HostEvent>();  // of rank 1's device
  std::latch computed(1);
  std::latch asked(1);
  run_nccl_mesh({2, 1}, [&](const Mesh& mesh) {
    const Event until = mesh.rank() == 1 ? Event(rest) : Event();
    Reducer reducer(mesh, {.replica_hop = std::make_shared<HeldHop>(until)});
    GpuRank rank(reducer, step, mesh);
    rank.run();
    if (mesh.rank() == 1) {
      computed.wait();
      mesh.world().abort("the test wants it");
      asked.wait();
      rest->finish(nullptr);
      return;
    }
    static_cast<void>(rank.read());
    computed.count_down();
    const auto ends = ThrowsMessage<Error>(HasSubstr("the test wants it"));
    EXPECT_THAT([&] { static_cast<void>(reducer.found_inf()); }, ends);
    EXPECT_THAT([&] { static_cast<void>(reducer.shard("w")); }, ends);
    asked.count_down();
  });
}

// One rank cannot start a thread: no rank has a Reducer, and the next attempt succeeds.
TEST(NcclReducerSetUp, FailsOnAllRanksAndMayBeTriedAgain) {
  const StepCase step = random_step(parameters(Dtype::kF32), 4, {Sync::kAll}, 9);
  const auto results = nccl_results(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
    for (int skipped = 0; skipped < 2; ++skipped) {
      const int bad = 1 + skipped;
      if (mesh.rank() == bad) {
        fail_call(FailingCall::kPthreadCreate, skipped);
        EXPECT_THROW(rank.begin(0), std::exception);
        EXPECT_TRUE(call_has_failed());
      } else {
        const auto error = caught<StepAbortedError>([&] { rank.begin(0); });
        EXPECT_EQ(error.value().ranks(), std::vector<int>{bad});
      }
      EXPECT_EQ(reducer.stats().resident_bytes, 0);
      EXPECT_GT(reducer.slice(step.parameters[1].name).count, 0);
    }
    return rank.run_step();
  });
  expect_reference(results, step, {}, kSquare, "after failures");
}

// A GPU reads 16 bytes of a row at a time if the row is aligned like the bucket.
TEST(NcclReducer, TellsWhatLiesMisaligned) {
  struct Case {
    Layout layout;
    Shape first;                        // of the parameters, before one of 640 elements
    std::array<std::int64_t, 2> bytes;  // by shard rank
  };
  // An odd size before it puts the second parameter, and rank 1's rows, at odd places.
  const std::array<Case, 4> cases{{{Layout::kFlat, {64}, {0, 0}},
                                   {Layout::kFlat, {3}, {1280, 1280 + 642}},
                                   {Layout::kDim0, {2, 32}, {0, 0}},
                                   {Layout::kDim0, {3}, {1280, 1280 + 642}}}};
  for (const Case& one : cases) {
    StepCase step = random_step({{.name = "a", .shape = one.first, .dtype = Dtype::kBf16},
                                 {.name = "b", .shape = {640}, .dtype = Dtype::kBf16}},
                                2, {Sync::kAll}, 11);
    run_nccl_mesh({1, 2}, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.layout = one.layout});
      GpuRank rank(reducer, step, mesh);
      static_cast<void>(rank.run_step());
      EXPECT_EQ(reducer.stats().misaligned_bytes,
                one.bytes[static_cast<std::size_t>(mesh.shard_rank())])
          << name(one.layout) << " " << one.first.front();
    });
  }
}

TEST(NcclReducer, CountsWhatKernelsAndCollectivesWorkIn) {
  const StepCase step = random_step(parameters(Dtype::kF32), 4, {Sync::kAll}, 12);
  run_nccl_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
    EXPECT_EQ(reducer.stats().scratch_bytes, 0);
    static_cast<void>(rank.run_step());
    const ReducerStats stats = reducer.stats();
    // At least the peer's row of a bucket and of a shard, which are summed with this rank's rows.
    EXPECT_GE(stats.scratch_bytes, kSmallBuckets / 2 + kSmallBuckets / 4);
    EXPECT_GE(stats.resident_bytes, stats.scratch_bytes + stats.carry_bytes + stats.staging_bytes);
    static_cast<void>(rank.run_step());
    EXPECT_EQ(reducer.stats().scratch_bytes, stats.scratch_bytes);
    EXPECT_EQ(reducer.memory_plan().scratch_bytes, stats.scratch_bytes) << "with the engine's";
    EXPECT_EQ(reducer.memory_plan().resident_bytes, stats.resident_bytes);
  });
}

TEST(NcclReducer, NonfiniteValuesAreFoundOnEveryRank) {
  for (const char* reduction : {"exact", "native"}) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
      StepCase step = integer_step({{.name = "w", .shape = {4096}, .dtype = dtype}}, 4, 2, 3);
      step.schedule = {Sync::kAll, Sync::kAll};
      (*step.gradients[0][0][2])[4000] = INFINITY;
      run_nccl_mesh(kSquare, [&](const Mesh& mesh) {
        Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets, .reduction = reduction});
        GpuRank rank(reducer, step, mesh);
        rank.run_microbatch(0);
        EXPECT_TRUE(reducer.found_inf());
        EXPECT_GT(reducer.grad_norm(), 1e30);
        rank.run_microbatch(1);
        EXPECT_FALSE(reducer.found_inf());
      });
    }
  }
}

// A stream of the caller, such as a framework's, that rank 0 captures into a graph during one of
// the calls. The Reducer refuses that call, the capture stays whole, and the next step is right.
using CaptureBody = std::function<void(Reducer&, GpuRank&, Stream& captured, int rank)>;
void run_during_a_capture(const CaptureBody& body) {
  const StepCase step = random_step(parameters(Dtype::kF32), 2, {Sync::kAll}, 17);
  const auto results = nccl_results({1, 2}, [&](const Mesh& mesh) {
    const Stream theirs = Stream::create(mesh.device(), "theirs");
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh, KeptUntil::kOrdered);
    static_cast<void>(rank.run_step());
    Stream captured = Stream::borrow(mesh.device(), theirs.native_handle());
    reducer.set_stream(captured);
    body(reducer, rank, captured, mesh.rank());
    reducer.set_stream(rank.stream());  // which reads the result
    RankResult result = rank.run_step();
    EXPECT_FALSE(reducer.found_inf());
    return result;
  });
  expect_reference(results, step, {}, {1, 2}, "after the capture");
}

const auto kIsCaptured = ThrowsMessage<UsageError>(HasSubstr("not being captured"));

void expect_dropped_by_rank_0(Reducer& reducer, int rank) {
  const auto end = [&] {
    reducer.end_microbatch();
    static_cast<void>(reducer.shard("odd"));
  };
  if (rank == 0) {
    EXPECT_THAT(end, kIsCaptured);
  } else {
    EXPECT_THAT(end, ThrowsMessage<StepAbortedError>(HasSubstr("rank 0")));
  }
}

TEST(NcclReducerCapture, RefusesAGradientAndDropsTheStep) {
  run_during_a_capture([](Reducer& reducer, GpuRank& rank, Stream& captured, int r) {
    const Values values(static_cast<std::size_t>(37 * 29), 1.0F);
    const StridedView view{values.data(), Dtype::kF32, gpu_of(r), {37, 29}, {}};
    rank.begin(0);
    if (r == 0) {
      const stand_in::Capture capture(captured.native_handle());
      EXPECT_THAT([&] { reducer.gradient_ready(0, view); }, kIsCaptured);
      EXPECT_THAT([&] { reducer.gradient_ready(0, view, {}, captured); }, kIsCaptured);
      EXPECT_THAT([&] { reducer.gradient_ready(0, view, {}, captured, KeptUntil::kOrdered); },
                  kIsCaptured);
    }
    rank.hand_over_all(0);
    expect_dropped_by_rank_0(reducer, r);
  });
}

// A stream is asked once for each bucket. A capture that begins later is found when the bucket is
// launched.
TEST(NcclReducerCapture, IsFoundWhereItBeginsWithinABucket) {
  run_nccl_mesh({1, 2}, [](const Mesh& mesh) {
    const Stream theirs = Stream::create(mesh.device(), "theirs");
    const Stream stream = Stream::borrow(mesh.device(), theirs.native_handle());
    const Values values(7, 1.0F);
    const StridedView view{values.data(), Dtype::kF32, mesh.device(), {7}, {}};
    Reducer reducer(mesh);
    reducer.set_stream(stream);
    for (const char* const name : {"odd", "other"}) {
      reducer.register_parameter({.name = name, .shape = {7}});
    }
    for (const bool captures : {true, false}) {
      reducer.begin_microbatch({.last = true});
      reducer.gradient_ready("odd", view, {}, stream);
      {
        std::optional<stand_in::Capture> capture;
        if (captures && mesh.rank() == 0) capture.emplace(theirs.native_handle());
        reducer.gradient_ready("other", view, {}, stream);
      }
      if (captures) expect_dropped_by_rank_0(reducer, mesh.rank());
    }
    reducer.end_microbatch();
    EXPECT_FALSE(reducer.found_inf());
  });
}

// Also for memory that is freed in the order of that stream.
TEST(NcclReducerCapture, LeavesItWholeWhereAMicrobatchEnds) {
  run_during_a_capture([](Reducer& reducer, GpuRank& rank, Stream& captured, int r) {
    rank.begin(0);
    const Values values(static_cast<std::size_t>(37 * 29), 1.0F);
    const StridedView view{values.data(), Dtype::kF32, gpu_of(r), {37, 29}, {}};
    reducer.gradient_ready(0, view, std::make_shared<int>(0), captured, KeptUntil::kOrdered);
    std::optional<stand_in::Capture> capture;
    if (r == 0) capture.emplace(captured.native_handle());
    for (std::size_t p = 1; p < parameters(Dtype::kF32).size(); ++p) rank.hand_over(p, 0);
    reducer.end_microbatch();
    static_cast<void>(reducer.found_inf());
  });
}

TEST(NcclReducerCapture, RefusesToReadAResult) {
  run_during_a_capture([](Reducer& reducer, GpuRank& rank, Stream& captured, int r) {
    rank.run_microbatch(0);
    if (r == 0) {
      const stand_in::Capture capture(captured.native_handle());
      EXPECT_THAT([&] { static_cast<void>(reducer.shard("large")); }, kIsCaptured);
    }
    EXPECT_EQ(reducer.shard("large").count, reducer.slice("large").count);
  });
}

}  // namespace
}  // namespace hsdp::test
