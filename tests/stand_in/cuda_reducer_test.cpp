// The Reducer on a GPU's memory and streams, on the stand-in for the CUDA runtime: its results, its
// order, its memory, and that the host does not wait.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <future>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda_stand_in.h"
#include "gpu_rank.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/flag.h"
#include "hsdp/error.h"
#include "hsdp/snapshot/digest_log.h"
#include "quant/loco_hop.h"
#include "tests/support/flipping_hop.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/wide_step.h"
#include "zero/adamw.h"
#include "zero/parameter_gather.h"

namespace hsdp::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class OnGpu : public ::testing::TestWithParam<MeshShape> {};

TEST_P(OnGpu, GradientsOfF64StayF64) {
  stand_in::delay_work(3);  // otherwise data that is read too early might be there by chance
  for (const Layout layout : {Layout::kFlat, Layout::kWhole}) {
    for (const ShardOver shard_over : {ShardOver::kShard, ShardOver::kMesh}) {
      run_gpu_mesh(GetParam(), [&](const Mesh& mesh) {
        expect_wide_step(
            mesh, {.layout = layout, .bucket_bytes = kSmallBuckets, .shard_over = shard_over},
            {Sync::kShard, std::nullopt, Sync::kNone, Sync::kAll});
      });
    }
  }
  stand_in::delay_work(std::nullopt);
}

TEST_P(OnGpu, TheNextStepLeavesAResultToItsReader) {
  const MeshShape shape = GetParam();
  const StepCase step = random_step(parameters(Dtype::kF32), shape.size(), {Sync::kAll}, 10);
  const StepCase next = random_step(parameters(Dtype::kF32), shape.size(), {Sync::kAll}, 11);
  const auto results = gpu_results(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
    rank.run();
    std::promise<void> released;
    Stream host = Stream::host_worker("reader");
    host.run([&released] { released.get_future().wait(); });
    rank.stream().wait(host.record());  // reads on that stream are late
    RankResult result;
    rank.enqueue_read(result);
    std::vector<StoredGradient> stored;  // without a wait before they are freed
    Microbatch open(reducer, {.last = true});
    for (std::size_t p = 0; p < next.parameters.size(); ++p) {
      const ParameterSpec& spec = next.parameters[p];
      stored.emplace_back(*next.gradients[p][0][static_cast<std::size_t>(mesh.rank())], spec.shape,
                          spec.dtype);
      StridedView view = stored.back().view();
      view.device = kGpu;
      reducer.gradient_ready(spec.name, view, {}, Event());
    }
    open.end();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // unordered work overtakes
    released.set_value();
    rank.stream().synchronize();
    EXPECT_FALSE(reducer.found_inf());
    return result;
  });
  expect_reference(results, step, {}, shape, "read late");
}

// Other streams wait for the gather only if they are told to; a late update holds up no step.
TEST_P(OnGpu, StartingAGatherWaitsForNothing) {
  const MeshShape shape = GetParam();
  const StepCase step =
      random_step(parameters(Dtype::kF32), shape.size(), {Sync::kShard, Sync::kAll}, 15);
  const auto results = gpu_results(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
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
    const RankResult result = rank.run_step();
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
    return result;
  });
  expect_reference(results, step, {}, shape, "beside a gather");
}

TEST_P(OnGpu, NobodyReadsAResultThatReplicasHaveOtherwise) {
  const MeshShape shape = GetParam();
  if (shape.replicate == 1) return;  // nothing to compare with
  const StepCase step =
      random_step(parameters(Dtype::kBf16), shape.size(), {Sync::kAll, Sync::kAll}, 8);
  stand_in::delay_work(3);
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    const bool flips = mesh.rank() == shape.size() - 1;
    const auto when = flips ? FlippingHop::When::kAfterSum : FlippingHop::When::kNever;
    const auto hop = std::make_shared<FlippingHop>(FlippingHop::Flip{when, 1, 0, 77});
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets, .replica_hop = hop, .verify_every = 1});
    GpuRank rank(reducer, step, mesh);
    rank.run_microbatch(0);
    static_cast<void>(rank.read());
    const auto error = caught<MismatchError>([&] {
      rank.run_microbatch(1);
      static_cast<void>(reducer.shard("large"));
    });
    EXPECT_THAT(error, says(HasSubstr("on all replicas in step 1")));
    EXPECT_THAT(error->ranks(), ::testing::Contains(shape.size() - 1));
    rank.finish();
  });
  stand_in::delay_work(std::nullopt);
}

TEST_P(OnGpu, FoundInfIsOneOrZeroOnTheDevice) {
  const MeshShape shape = GetParam();
  StepCase step = random_step(parameters(Dtype::kBf16), shape.size(), {Sync::kAll, Sync::kAll}, 8);
  for (auto& gradient : step.gradients[2][0]) {  // on every rank, so that a sum of ones is still 1
    (*gradient)[4000] = std::numeric_limits<float>::infinity();
  }
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
    rank.run_microbatch(0);
    std::vector<float> words{-1.0F, -1.0F};
    static_cast<void>(mesh.world().exchange("", "ready"));
    {
      const stand_in::Standstill nothing_moves;
      reducer.found_inf({words.data(), 1, Dtype::kF32, kGpu});
      EXPECT_FALSE(rank.stream().record().complete());
    }
    const ReducerStats before = reducer.stats();
    rank.run_microbatch(1);
    reducer.found_inf({words.data() + 1, 1, Dtype::kF32, kGpu});
    rank.stream().synchronize();
    EXPECT_THAT(words, ElementsAre(1.0F, 0.0F));
    const std::int64_t replica_hops = shape.replicate > 1 ? before.bucket_count : 0;
    EXPECT_EQ(reducer.stats().all_reduce_count, before.all_reduce_count + replica_hops);
  });
}

TEST_P(OnGpu, ClippingGivesTheBitsOfTheHostWithoutWaiting) {
  const MeshShape shape = GetParam();
  const StepCase step =
      random_step(parameters(Dtype::kBf16), shape.size(), {Sync::kAll, Sync::kAll}, 13);
  for (const double max_norm : {0.25, 1e9}) {
    run_gpu_mesh(shape, [&](const Mesh& mesh) {
      Reducer one(mesh, {.bucket_bytes = kSmallBuckets});
      Reducer other(mesh, {.bucket_bytes = kSmallBuckets});
      const std::vector<Reducer*> both{&one, &other};
      // Clipping sets the first one's stream on both Reducers, so gradients name their streams.
      std::array<GpuRank, 2> ranks{GpuRank(one, step, mesh, KeptUntil::kOrdered),
                                   GpuRank(other, step, mesh, KeptUntil::kOrdered)};
      std::vector<Values> clipped;
      std::vector<double> norms(4);
      for (const bool on_device : {false, true}) {
        for (std::size_t r : {0U, 1U}) ranks[r].run_microbatch(r);
        if (on_device) {
          static_cast<void>(one.grad_norm());  // all work so far is done
          static_cast<void>(other.grad_norm());
          static_cast<void>(mesh.world().exchange("", "ready"));
          const stand_in::Standstill nothing_moves;
          one.grad_norm({norms.data() + 2, 1, Dtype::kF64, kGpu});
          clip_grad_norm(both, max_norm, {norms.data() + 3, 1, Dtype::kF64, kGpu});
          EXPECT_FALSE(ranks[0].stream().record().complete());
        } else {
          norms[0] = one.grad_norm();
          norms[1] = clip_grad_norm(both, max_norm);
        }
        for (Reducer* reducer : both) {
          const TensorView shard = reducer->shard("large");
          ranks[0].stream().synchronize();
          clipped.push_back(values_of(shard));
        }
      }
      EXPECT_EQ(norms[2], norms[0]);
      EXPECT_EQ(norms[3], norms[1]);
      EXPECT_GT(norms[1], norms[0]);
      expect_same_bits(clipped[2], clipped[0], "one");
      expect_same_bits(clipped[3], clipped[1], "other");
    });
  }
}

TEST_P(OnGpu, PartialsAreReadInStreamOrder) {
  const MeshShape shape = GetParam();
  const StepCase step = random_step(parameters(Dtype::kBf16), shape.size(), {Sync::kShard}, 11);
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
    rank.run();
    const Values want = reducer.partial_shard("large");
    Values got(want.size());
    const TensorView out{got.data(), reducer.slice("large").count, Dtype::kF32, kGpu};
    static_cast<void>(mesh.world().exchange("", "ready"));
    {
      const stand_in::Standstill nothing_moves;
      reducer.partial_shard("large", out);
      EXPECT_FALSE(rank.stream().record().complete());
    }
    rank.stream().synchronize();
    expect_same_bits(got, want, "partial");
    reducer.discard();
  });
}

TEST_P(OnGpu, BucketsAreThoseOfAGpu) {
  run_gpu_mesh(GetParam(), [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {5 << 20}});
    reducer.begin_microbatch();
    EXPECT_EQ(reducer.stats().bucket_count, 1);
    reducer.abandon_step("of the test");
  });
}

// For a step with that many parameters, in one bucket.
std::int64_t launches_of_step(const MeshShape& shape, int parameter_count) {
  std::vector<ParameterSpec> specs;
  for (int p = 0; p < parameter_count; ++p) {
    specs.push_back({.name = std::to_string(p), .shape = {4096 / parameter_count}});
  }
  const StepCase step =
      random_step(specs, shape.size(), {Sync::kNone, Sync::kShard, Sync::kAll}, 16);
  std::int64_t launches = 0;
  const auto results = gpu_results(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    GpuRank rank(reducer, step, mesh);
    reducer.prepare();
    static_cast<void>(mesh.world().exchange("", "prepared"));
    const std::int64_t before = stand_in::kernel_launches();
    static_cast<void>(mesh.world().exchange("", "counted"));
    RankResult result = rank.run_step();
    static_cast<void>(reducer.found_inf());  // the last work of a step
    static_cast<void>(mesh.world().exchange("", "over"));
    if (mesh.rank() == 0) launches = stand_in::kernel_launches() - before;
    static_cast<void>(mesh.world().exchange("", "counted again"));
    return result;
  });
  expect_reference(results, step, {}, shape, "one launch for many gradients");
  return launches;
}

TEST_P(OnGpu, ABucketIsPackedByOneLaunch) {
  EXPECT_EQ(launches_of_step(GetParam(), 64), launches_of_step(GetParam(), 4));
}

INSTANTIATE_TEST_SUITE_P(Meshes, OnGpu,
                         ::testing::Values(MeshShape{1, 1}, MeshShape{1, 2}, MeshShape{2, 1},
                                           kSquare),
                         ::testing::PrintToStringParamName());

TEST(CudaReducer, AStepTakesNoMemory) {
  const StepCase step = random_step(parameters(Dtype::kF32), 4, {Sync::kShard, Sync::kAll}, 15);
  std::vector<Flag> others;
  const auto results = gpu_results(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = kSmallBuckets});
    GpuRank rank(reducer, step, mesh);
    reducer.prepare();
    static_cast<void>(mesh.world().exchange("", "prepared"));
    if (mesh.rank() == 0) {
      stand_in::fail_allocation({{.times = stand_in::kAlways}});
      EXPECT_THROW(while (true) others.push_back(make_flag(kGpu)), Error);
    }
    static_cast<void>(mesh.world().exchange("", "nothing is left"));
    rank.run();
    RankResult result = rank.run_step();
    static_cast<void>(mesh.world().exchange("", "over"));
    if (mesh.rank() == 0) stand_in::fail_allocation(std::nullopt);
    return result;
  });
  expect_reference(results, step, {}, kSquare, "without memory");
}

TEST(CudaReducer, WritesTheDigestsOfTheHost) {
  const TemporaryDirectory folder;
  const StepCase step = random_step(parameters(Dtype::kBf16), 4, {Sync::kShard, Sync::kAll}, 16);
  const ReducerOptions options{.bucket_bytes = kSmallBuckets};
  run_gpu_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    GpuRank rank(reducer, step, mesh);
    rank.run();
    reducer.save_digest(folder / "gpu", 7);
  });
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    register_all(reducer, step);
    run_step(reducer, step, mesh.rank());
    reducer.save_digest(folder / "host", 7);
  });
  for (int r = 0; r < 4; ++r) {
    const DigestLog gpu = read_digests(folder / "gpu", r);
    const DigestLog host = read_digests(folder / "host", r);
    EXPECT_EQ(gpu.header, host.header);
    EXPECT_EQ(gpu.steps, host.steps);
    EXPECT_EQ(gpu.steps.at(7).size(), step.parameters.size());
  }
}

TEST(CudaReducer, ComparesWhatWasGathered) {
  constexpr std::int64_t kCount = 4096;
  stand_in::delay_work(3);
  run_gpu_mesh(kSquare, [](const Mesh& mesh) {
    Reducer reducer(mesh, {.verify_every = 1});
    Stream stream = Stream::create(mesh.device(), "caller");
    reducer.set_stream(stream);
    reducer.register_parameter({.name = "w", .shape = {kCount}});
    const Buffer memory(mesh.device(), kCount * sizeof(float));
    const TensorView whole = memory.view(Dtype::kF32);
    zero::ParameterGather gather(reducer, {{.name = "w", .array = whole}});
    const std::vector<float> gradient(kCount, 1.0F);
    for (int step = 0; step < 4; ++step) {
      std::vector<float> values(kCount, static_cast<float>(step));
      if (step == 3 && mesh.rank() == 3) values.back() += 1;
      gather.fence(stream);
      copy_bytes(whole.data, values.data(), whole.size_in_bytes(), stream);
      gather.start_all(stream.record());
      const auto error = caught<MismatchError>([&] {
        Microbatch open(reducer, {.last = true});
        reducer.gradient_ready("w", {gradient.data(), Dtype::kF32, mesh.device(), {kCount}, {}});
        open.end();
        static_cast<void>(reducer.found_inf());
      });
      if (step < 3) {
        EXPECT_EQ(error, std::nullopt);
      } else {
        EXPECT_THAT(error, names({2, 3}, HasSubstr("'w of digest")));
      }
      stream.synchronize();  // the memory that it copies from is free
    }
  });
  stand_in::delay_work({});
}

// A context takes hundreds of megabytes. A thread begins with device 0.
TEST(CudaReducer, HasContextsOnTheMeshsDeviceAlone) {
  constexpr std::int64_t kCount = 4096;
  stand_in::forget_contexts();
  const auto body = [](const Mesh& mesh) {
    const auto hop = std::make_shared<quant::LocoHop>();
    Reducer reducer(mesh, {.replica_hop = hop});
    Stream stream = Stream::create(mesh.device(), "caller");
    reducer.set_stream(stream);
    reducer.register_parameter({.name = "w", .shape = {kCount}});
    const Buffer memory(mesh.device(), kCount * sizeof(float));
    const TensorView whole = memory.view(Dtype::kF32);
    const Slice own = reducer.slice("w");
    zero::AdamW optimizer(reducer, {{"w", whole.slice(own.offset, own.count)}});
    zero::ParameterGather gather(reducer, {{.name = "w", .array = whole}});
    const std::vector<float> gradient(kCount, 1.0F);
    for (const bool last : {false, true}) {
      Microbatch open(reducer, {.last = last});
      reducer.gradient_ready("w", {gradient.data(), Dtype::kF32, mesh.device(), {kCount}, {}});
      open.end();
    }
    static_cast<void>(reducer.clip_grad_norm(1.0));
    EXPECT_FALSE(reducer.found_inf());
    optimizer.update(stream, {});
    gather.start_all(stream.record());
    gather.wait_all();
    EXPECT_EQ(optimizer.steps(stream), 1);
    EXPECT_FALSE(hop->state().empty());
    static_cast<void>(mesh.world().exchange("", "over"));
  };
  run_gpu_mesh(kSquare, body, {DeviceType::kCuda, 1});
  EXPECT_EQ(stand_in::contexts(), std::set<int>{1});
}

TEST(CudaReducer, RefusesMemoryAndStreamsOfOtherDevices) {
  run_gpu_mesh({1, 1}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {2, 2}});
    EXPECT_THAT(
        [&] { reducer.set_stream(Stream::inline_host()); },
        ThrowsMessage<UsageError>(HasSubstr("expected a stream of cuda:0, got one of cpu")));
    std::vector<float> values(8);
    struct Row {
      const void* data;
      Device device;
      const char* text;
    };
    const Row rows[] = {
        {values.data(), {}, "expected memory on cuda:0, the mesh's device, got cpu"},
        {values.data(),
         {DeviceType::kCuda, 1},
         "expected memory on cuda:0, the mesh's device, got cuda:1"},
        {reinterpret_cast<const std::byte*>(values.data()) + 2, kGpu, "multiple of 4 bytes"}};
    for (const Row& row : rows) {
      const auto refused = [&] {
        Microbatch open(reducer, {.last = true});
        reducer.gradient_ready("w", {row.data, Dtype::kF32, row.device, {2, 2}, {}});
      };
      EXPECT_THAT(refused, ThrowsMessage<UsageError>(HasSubstr(row.text)));
    }
  });
}

TEST(CudaReducer, RefusesOutputsOfOtherDevicesAndKinds) {
  run_gpu_mesh({1, 1}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {2, 2}});
    std::vector<float> values(4, 7.0F);
    const std::pair<TensorView, const char*> rows[] = {
        {{values.data(), 1, Dtype::kF32, {}}, "1 f32 on cuda:0, got 1 f32 on cpu"},
        {{values.data(), 1, Dtype::kI64, kGpu}, "got 1 i64 on cuda:0"},
        {{nullptr, 1, Dtype::kF32, kGpu}, "got a null pointer"}};
    for (const auto& row : rows) {
      EXPECT_THAT([&] { reducer.found_inf(row.first); },
                  ThrowsMessage<UsageError>(HasSubstr(row.second)));
    }
    reducer.found_inf({values.data(), 1, Dtype::kF32, kGpu}).wait();
    EXPECT_EQ(values[0], 0.0F);  // no step, so nothing non-finite
    const NamedArray elsewhere{"w", {values.data(), 4, Dtype::kF32, {DeviceType::kCuda, 1}}};
    EXPECT_THAT(([&] { reducer.gather_gradients(std::span(&elsewhere, 1)); }),
                ThrowsMessage<UsageError>(HasSubstr("expected memory on cuda:0, the mesh's device, "
                                                    "got cuda:1")));
  });
}

}  // namespace
}  // namespace hsdp::test
