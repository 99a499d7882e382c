// The Reducer on the memory and the streams of a GPU, on the stand-in for the CUDA runtime: its
// bits, its order, and that the host does not wait.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda_stand_in.h"
#include "device_rank.h"
#include "hsdp/device/flag.h"
#include "hsdp/device/host_event.h"
#include "hsdp/error.h"
#include "hsdp/replica_hop.h"
#include "tests/support/gather_steps.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using stand_in::kGpu;
using stand_in::parameters;
using stand_in::Rank;
using stand_in::run_gpu_mesh;
using Bytes = stand_in::Bytes;

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
          {"many_backwards", {shard, none, all}, false, {.backwards = Backwards::kMany}},
          {"param_accumulators",
           {none, shard, none, all},
           false,
           {.accumulate_dtype = AccumulateDtype::kParam}},
          {"f32_wire", {shard, all}, false, {.reduce_dtype = Dtype::kF32}}};
}

class OnGpu : public ::testing::TestWithParam<test::MeshShape> {};

TEST_P(OnGpu, StepsHaveTheBitsOfTheReference) {
  const test::MeshShape shape = GetParam();
  std::uint64_t seed = 1;
  for (Plan plan : plans()) {
    plan.options.bucket_bytes = 4096;
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      const test::StepCase base =
          test::random_step(parameters(dtype), shape.size(), plan.schedule, ++seed);
      test::StepCase step = base;
      step.finish = plan.finish;
      std::vector<test::RankResult> results(static_cast<std::size_t>(shape.size()));
      run_gpu_mesh(shape, [&](const Mesh& mesh) {
        Reducer reducer(mesh, plan.options);
        test::register_all(reducer, step);
        Rank rank(reducer, step, mesh.rank());
        for (int repeat = 0; repeat < 2; ++repeat) {
          auto& result = results[static_cast<std::size_t>(mesh.rank())];
          result = {};
          rank.run_steps();
          rank.read(result);
          rank.stream().synchronize();
        }
        EXPECT_FALSE(reducer.found_inf());
      });
      test::expect_reference(results, step, plan.options, shape,
                             std::string(plan.name) + " " + std::string(name(dtype)));
    }
  }
}

TEST_P(OnGpu, TheHostDoesNotWaitForTheGpu) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step = test::random_step(parameters(Dtype::kBf16), shape.size(),
                                                {Sync::kShard, Sync::kShard, Sync::kAll}, 5);
  const ReducerOptions options{.bucket_bytes = 4096};
  std::vector<test::RankResult> results(static_cast<std::size_t>(shape.size()));
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    rank.run_steps();  // takes the memory that steps need
    static_cast<void>(reducer.found_inf());
    static_cast<void>(mesh.world().exchange("", "ready"));
    {
      const stand_in::Standstill nothing_moves;
      rank.run_steps();
      rank.run_steps();
      rank.read(results[static_cast<std::size_t>(mesh.rank())]);
      EXPECT_FALSE(rank.stream().record().complete());
      EXPECT_FALSE(reducer.packed().complete());
    }
    rank.stream().synchronize();
  });
  test::expect_reference(results, step, options, shape, "standing still");
}

TEST_P(OnGpu, GradientsAreHeldUntilTheyAreRead) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step =
      test::random_step(parameters(Dtype::kF32), shape.size(), {Sync::kAll, Sync::kAll}, 6);
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    std::vector<std::weak_ptr<Bytes>> gradients;
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    test::register_all(reducer, step);
    {
      Rank rank(reducer, step, mesh.rank());
      rank.run_microbatch(0, {.last = true});
      static_cast<void>(reducer.found_inf());
      static_cast<void>(mesh.world().exchange("", "ready"));
      const stand_in::Standstill nothing_moves;
      Microbatch open(reducer, {.last = true});
      for (std::size_t p = 0; p < step.parameters.size(); ++p) {
        gradients.push_back(rank.hand_over(p, 1));
      }
      open.end();
      for (const auto& gradient : gradients) EXPECT_FALSE(gradient.expired());
    }
    const auto all_are_let_go = [&gradients] {
      return std::ranges::all_of(gradients, [](const auto& held) { return held.expired(); });
    };
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!all_are_let_go() && std::chrono::steady_clock::now() < end) {
      reducer.packed().wait();  // and looks whom it can let go
    }
    EXPECT_TRUE(all_are_let_go());
  });
}

TEST_P(OnGpu, ResultsEqualThoseOfTheHost) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step =
      test::random_step(parameters(Dtype::kBf16), shape.size(), {Sync::kShard, Sync::kAll}, 7);
  const ReducerOptions options{.bucket_bytes = 4096};
  struct Read {
    std::vector<float> partial;
    double norm = 0;
    test::Values gathered;
    test::Values clipped;
  };
  std::vector<Read> on_host(static_cast<std::size_t>(shape.size()));
  std::vector<Read> on_gpu = on_host;
  const auto gather = [&](Reducer& reducer, Device device, Read& read) {
    read.gathered.resize(5003);
    const NamedArray array{"large", {read.gathered.data(), 5003, Dtype::kF32, device}};
    reducer.gather_gradients(std::span(&array, 1));
  };
  test::run_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    test::register_all(reducer, step);
    Read& read = on_host[static_cast<std::size_t>(mesh.rank())];
    test::run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    read.partial = reducer.partial_shard("large");
    test::run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
    read.norm = reducer.clip_grad_norm(0.25);
    gather(reducer, {}, read);
    read.clipped = test::values_of(reducer.shard("matrix"));
  });
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    Read& read = on_gpu[static_cast<std::size_t>(mesh.rank())];
    rank.run_microbatch(0, {.last = false});
    read.partial = reducer.partial_shard("large");
    rank.run_microbatch(1, {.last = true});
    read.norm = reducer.clip_grad_norm(0.25);
    gather(reducer, kGpu, read);
    rank.stream().synchronize();
    read.clipped = test::values_of(reducer.shard("matrix"));
  });
  for (std::size_t r = 0; r < on_host.size(); ++r) {
    test::expect_same_bits(on_gpu[r].partial, on_host[r].partial, "partial");
    EXPECT_EQ(on_gpu[r].norm, on_host[r].norm);
    test::expect_same_bits(on_gpu[r].gathered, on_host[r].gathered, "gathered");
    test::expect_same_bits(on_gpu[r].clipped, on_host[r].clipped, "clipped");
  }
}

TEST_P(OnGpu, InfinityIsFoundOnEveryRank) {
  const test::MeshShape shape = GetParam();
  test::StepCase step =
      test::random_step(parameters(Dtype::kBf16), shape.size(), {Sync::kAll, Sync::kAll}, 8);
  (*step.gradients[2][0].back())[4000] = std::numeric_limits<float>::infinity();
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    rank.run_microbatch(0, {.last = true});
    EXPECT_TRUE(reducer.found_inf());
    rank.run_microbatch(1, {.last = true});
    EXPECT_FALSE(reducer.found_inf());
  });
}

TEST_P(OnGpu, AnAbandonedMicrobatchLeavesAllRanksUsable) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step =
      test::random_step(parameters(Dtype::kF16), shape.size(), {Sync::kShard, Sync::kAll}, 9);
  const ReducerOptions options{.bucket_bytes = 4096};
  std::vector<test::RankResult> results(static_cast<std::size_t>(shape.size()));
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    rank.run_microbatch(0, {.last = false});
    if (mesh.rank() == 0) {
      EXPECT_THROW(
          {
            Microbatch open(reducer, {.last = true});
            rank.hand_over(0, 1);
            throw std::logic_error("of the caller");
          },
          std::logic_error);
    } else {
      EXPECT_THROW(
          {
            rank.run_microbatch(1, {.last = true});
            static_cast<void>(reducer.shard("odd"));
          },
          StepAbortedError);
    }
    rank.run_steps();
    rank.read(results[static_cast<std::size_t>(mesh.rank())]);
    rank.stream().synchronize();
  });
  test::expect_reference(results, step, options, shape, "after an abandoned step");
}

TEST_P(OnGpu, TheNextStepLeavesAResultToItsReader) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step =
      test::random_step(parameters(Dtype::kF32), shape.size(), {Sync::kAll, Sync::kAll}, 10);
  test::StepCase first = step;
  first.schedule = {Sync::kAll};
  for (test::Gradients& gradients : first.gradients) gradients.resize(1);
  const ReducerOptions options{.bucket_bytes = 4096};
  std::vector<test::RankResult> results(static_cast<std::size_t>(shape.size()));
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    rank.run_microbatch(0, {.last = true});
    std::promise<void> released;
    Stream host = Stream::host_worker("reader");
    host.run([&released] { released.get_future().wait(); });
    rank.stream().wait(host.record());  // whoever reads there is late
    rank.read(results[static_cast<std::size_t>(mesh.rank())]);
    const std::vector<test::StoredGradient> next = rank.hand_over_at_once(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // what does not wait overtakes
    released.set_value();
    rank.stream().synchronize();
    EXPECT_FALSE(reducer.found_inf());
  });
  test::expect_reference(results, first, options, shape, "read late");
}

TEST_P(OnGpu, GathersUnderMicrobatchesHaveTheBitsOfGatherParameters) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step = test::random_step(parameters(Dtype::kF32), shape.size(),
                                                {Sync::kShard, Sync::kNone, Sync::kAll}, 14);
  std::vector<std::vector<test::Values>> gathered(static_cast<std::size_t>(shape.size()));
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    test::GatherSteps steps{.count = 6};
    steps.microbatch = [&](int m, const std::function<void()>& inside) {
      const auto microbatch = static_cast<std::size_t>(m);
      Microbatch open(reducer, {.sync = step.schedule[microbatch]});
      for (std::size_t p = 0; p < step.parameters.size(); ++p) rank.hand_over(p, microbatch);
      inside();
      open.end();
    };
    steps.shards = [&] {
      test::RankResult result;
      rank.read(result);
      rank.stream().synchronize();
      return result.shards;
    };
    gathered[static_cast<std::size_t>(mesh.rank())] =
        test::run_gather_steps(reducer, step, mesh, steps);
  });
  for (const auto& of_rank : gathered) EXPECT_EQ(of_rank, gathered.front());
}

// Nor do streams that are told to wait for the gather; a late update holds up no step.
TEST_P(OnGpu, StartingAGatherWaitsForNothing) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step =
      test::random_step(parameters(Dtype::kF32), shape.size(), {Sync::kShard, Sync::kAll}, 15);
  std::vector<test::RankResult> results(static_cast<std::size_t>(shape.size()));
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    reducer.prepare();
    std::vector<float> whole(64, static_cast<float>(mesh.shard_rank()));
    zero::ParameterGather gather(
        reducer, {{.name = "odd", .array = {whole.data(), 7, Dtype::kF32, kGpu}}}, 1 << 10);
    std::promise<void> updated;
    Stream host = Stream::host_worker("updater");
    host.run([&updated] { updated.get_future().wait(); });
    Stream writer = Stream::create(kGpu, "writer");
    writer.wait(host.record());
    const Event gathered = gather.start(0, writer.record());
    Stream reader = Stream::create(kGpu, "reader");
    reader.wait(gathered);
    rank.run_steps();
    rank.read(results[static_cast<std::size_t>(mesh.rank())]);
    rank.stream().synchronize();
    EXPECT_FALSE(gathered.complete());
    EXPECT_FALSE(reader.record().complete());
    updated.set_value();
    reader.synchronize();
    EXPECT_TRUE(gathered.complete());
    for (int r = 0; r < shape.shard; ++r) {
      const Slice slice = reducer.layout().slice(1, r);
      if (slice.count > 0) {
        EXPECT_EQ(whole[static_cast<std::size_t>(slice.offset)], static_cast<float>(r));
      }
    }
  });
  test::expect_reference(results, step, {.bucket_bytes = 4096}, shape, "beside a gather");
}

INSTANTIATE_TEST_SUITE_P(Meshes, OnGpu,
                         ::testing::Values(test::MeshShape{1, 1}, test::MeshShape{1, 2},
                                           test::MeshShape{2, 1}, test::MeshShape{2, 2}),
                         ::testing::PrintToStringParamName());

// Whose buckets go wrong after reduce() has returned.
class LateHop final : public ReplicaHop {
 public:
  explicit LateHop(bool fails) : fails_(fails) {}
  [[nodiscard]] std::string describe() const override { return "late"; }
  void prepare(const HopPlan& plan) override { plain_.prepare(plan); }
  void bind(Communicator scatter, Communicator gather) override {
    if (later_.valid()) later_.wait();
    plain_.bind(std::move(scatter), std::move(gather));
  }
  Event reduce(const HopBucket& bucket, Stream& stream) override {
    static_cast<void>(plain_.reduce(bucket, stream));
    if (!fails_) return {};
    const auto done = std::make_shared<HostEvent>();
    later_ = std::async(std::launch::async, [done] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      done->finish(std::make_exception_ptr(Error("hop: the codec failed")));
    });
    return Event(done);
  }
  void end_step(const StepEnd& end) override { ends.push_back(end); }

  std::vector<StepEnd> ends;

 private:
  bool fails_;
  PlainHop plain_;
  std::future<void> later_;
};

TEST(CudaReducer, AHopThatFailsLateEndsTheWorld) {
  const test::StepCase step =
      test::random_step({{.name = "w", .shape = {64}}}, 2, {Sync::kAll}, 11);
  run_gpu_mesh({2, 1}, [&](const Mesh& mesh) {
    const auto hop = std::make_shared<LateHop>(mesh.rank() == 1);
    {
      Reducer reducer(mesh, {.replica_hop = hop});
      test::register_all(reducer, step);
      Rank rank(reducer, step, mesh.rank());
      EXPECT_THAT(
          [&] {
            rank.run_steps();
            static_cast<void>(reducer.found_inf());
          },
          ThrowsMessage<Error>(HasSubstr("hop: the codec failed")));
    }
    ASSERT_EQ(hop->ends.size(), 1U);
    EXPECT_EQ(hop->ends.front().outcome, StepOutcome::kDropped);
  });
}

// Of a step with so many parameters, which are one bucket.
std::int64_t launches_of_step(const test::MeshShape& shape, int parameter_count) {
  std::vector<ParameterSpec> specs;
  for (int p = 0; p < parameter_count; ++p) {
    specs.push_back({.name = std::to_string(p), .shape = {4096 / parameter_count}});
  }
  const test::StepCase step =
      test::random_step(specs, shape.size(), {Sync::kNone, Sync::kShard, Sync::kAll}, 16);
  std::vector<test::RankResult> results(static_cast<std::size_t>(shape.size()));
  std::int64_t launches = 0;
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    reducer.prepare();
    static_cast<void>(mesh.world().exchange("", "prepared"));
    const std::int64_t before = stand_in::kernel_launches();
    static_cast<void>(mesh.world().exchange("", "counted"));
    rank.run_steps();
    rank.read(results[static_cast<std::size_t>(mesh.rank())]);
    rank.stream().synchronize();
    static_cast<void>(reducer.found_inf());  // the last thing that a step does
    static_cast<void>(mesh.world().exchange("", "over"));
    if (mesh.rank() == 0) launches = stand_in::kernel_launches() - before;
    static_cast<void>(mesh.world().exchange("", "counted again"));
  });
  test::expect_reference(results, step, {}, shape, "one launch for many gradients");
  return launches;
}

TEST(CudaReducer, ABucketIsPackedByOneLaunch) {
  for (const test::MeshShape shape : {test::MeshShape{1, 1}, {1, 2}, {2, 1}, {2, 2}}) {
    EXPECT_EQ(launches_of_step(shape, 64), launches_of_step(shape, 4));
  }
}

TEST(CudaReducer, AStepTakesNoMemory) {
  const test::MeshShape shape{2, 2};
  const test::StepCase step =
      test::random_step(parameters(Dtype::kF32), 4, {Sync::kShard, Sync::kAll}, 15);
  const ReducerOptions options{.bucket_bytes = 4096};
  std::vector<test::RankResult> results(4);
  std::vector<Flag> others;
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    test::register_all(reducer, step);
    reducer.prepare();
    static_cast<void>(mesh.world().exchange("", "prepared"));
    if (mesh.rank() == 0) {
      stand_in::fail_allocation({{.times = std::numeric_limits<int>::max()}});
      EXPECT_THROW(while (true) others.push_back(make_flag(kGpu)), Error);
    }
    static_cast<void>(mesh.world().exchange("", "nothing is left"));
    Rank rank(reducer, step, mesh.rank());
    rank.run_steps();
    rank.run_steps();
    rank.read(results[static_cast<std::size_t>(mesh.rank())]);
    rank.stream().synchronize();
    static_cast<void>(mesh.world().exchange("", "over"));
    if (mesh.rank() == 0) stand_in::fail_allocation(std::nullopt);
  });
  test::expect_reference(results, step, options, shape, "without memory");
}

TEST(CudaReducer, RefusesMemoryAndStreamsOfOtherDevices) {
  run_gpu_mesh({1, 1}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {2, 2}});
    EXPECT_THAT(
        [&] { reducer.set_stream(Stream::inline_host()); },
        ThrowsMessage<UsageError>(HasSubstr("expected a stream of cuda:0, got one of cpu")));
    std::vector<float> values(8);
    const auto refused = [&](const StridedView& view) {
      Microbatch open(reducer, {.last = true});
      reducer.gradient_ready("w", view);
    };
    EXPECT_THAT(([&] {
                  refused({values.data(), Dtype::kF32, {}, {2, 2}, {}});
                }),
                ThrowsMessage<UsageError>(
                    HasSubstr("expected memory on cuda:0, the mesh's device, got cpu")));
    EXPECT_THAT(([&] {
                  refused({values.data(), Dtype::kF32, {DeviceType::kCuda, 1}, {2, 2}, {}});
                }),
                ThrowsMessage<UsageError>(
                    HasSubstr("expected memory on cuda:0, the mesh's device, got cuda:1")));
    const auto* const crooked = reinterpret_cast<const std::byte*>(values.data()) + 2;
    EXPECT_THAT(([&] {
                  refused({crooked, Dtype::kF32, kGpu, {2, 2}, {}});
                }),
                ThrowsMessage<UsageError>(HasSubstr("multiple of 4 bytes")));
  });
}

}  // namespace
}  // namespace hsdp
