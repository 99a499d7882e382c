// Gradients that a Reducer reads and releases, on the stand-in for the CUDA runtime: their memory,
// their streams, and failed allocations.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "capture.h"
#include "cuda_stand_in.h"
#include "gpu_rank.h"
#include "hsdp/error.h"

namespace hsdp::test {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class GpuGradients : public ::testing::TestWithParam<MeshShape> {};

Values read_shard(Reducer& reducer, const std::string& name, Stream& stream) {
  const TensorView shard = reducer.shard(name);
  Values values(static_cast<std::size_t>(shard.count));
  copy_bytes(values.data(), shard.data, shard.size_in_bytes(), stream);
  stream.synchronize();
  return values;
}

StridedView view_of(const Values& values) {
  return {values.data(), Dtype::kF32, kGpu, {static_cast<std::int64_t>(values.size())}, {}};
}

void register_numbered(Reducer& reducer, int count, std::int64_t elements) {
  for (int p = 0; p < count; ++p) {
    reducer.register_parameter({.name = std::to_string(p), .shape = {elements}});
  }
  reducer.prepare();
}

// Memory that is overwritten on a stream as soon as its owner releases it, as by an allocator that
// frees in stream order.
std::shared_ptr<const void> reused(const std::shared_ptr<Values>& memory, const Stream& stream,
                                   std::atomic<int>& count) {
  return {memory.get(), [memory, queue = Stream(stream), &count](const void* /*data*/) mutable {
            static const Values kOther(1024, -1.0F);
            queue.run([&] {
              copy_bytes(memory->data(), kOther.data(), memory->size() * sizeof(float), queue);
            });
            ++count;
          }};
}

TEST_P(GpuGradients, OrderedGradientsAreReusedInTheOrderOfTheirStream) {
  constexpr int kParameters = 12;  // and as many buckets
  const MeshShape shape = GetParam();
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Stream stream = Stream::create(kGpu, "caller");
    std::vector<std::shared_ptr<Values>> memory;
    std::atomic<int> reuses = 0;
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    reducer.set_stream(stream);
    register_numbered(reducer, kParameters, 1024);
    for (int p = 0; p < kParameters; ++p) {
      memory.push_back(std::make_shared<Values>(1024, static_cast<float>(p + mesh.rank())));
    }
    static_cast<void>(mesh.world().exchange("", "ready"));
    {
      const stand_in::Standstill nothing_moves;
      Microbatch open(reducer, {.last = true});
      for (int p = 0; p < kParameters; ++p) {
        const auto& own = memory[static_cast<std::size_t>(p)];
        reducer.gradient_ready(p, view_of(*own), reused(own, stream, reuses), stream,
                               KeptUntil::kOrdered);
      }
      open.end();
      // Two are under way and one is being launched; others may still be released.
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (reuses < kParameters - 3 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
      EXPECT_GE(reuses, kParameters - 3);
      EXPECT_LT(reuses, kParameters);
    }
    for (int p = 0; p < kParameters; ++p) {
      const Values got = read_shard(reducer, std::to_string(p), stream);
      const float mean = static_cast<float>(p) + static_cast<float>(shape.size() - 1) / 2;
      EXPECT_THAT(got, Each(mean));
    }
    static_cast<void>(reducer.found_inf());  // the GPU is done, and every rank has looked
    EXPECT_EQ(reuses, kParameters);
    stream.synchronize();
    static_cast<void>(mesh.world().exchange("", "over"));
  });
}

TEST_P(GpuGradients, GradientsAreKeptUntilTheyAreRead) {
  run_gpu_mesh(GetParam(), [&](const Mesh& mesh) {
    Stream stream = Stream::create(kGpu, "caller");
    const Values gradient(1024, 1.0F);
    Reducer reducer(mesh);
    reducer.set_stream(stream);
    register_numbered(reducer, 1, 1024);
    for (const ValidAfter& valid : {ValidAfter(Event()), ValidAfter()}) {
      static_cast<void>(mesh.world().exchange("", "ready"));
      auto owner = std::make_shared<int>(1);
      const std::weak_ptr<int> life = owner;
      {
        const stand_in::Standstill nothing_moves;
        Microbatch open(reducer, {.last = true});
        reducer.gradient_ready(0, view_of(gradient), std::exchange(owner, nullptr), valid);
        open.end();
        EXPECT_FALSE(life.expired());
      }
      if (valid.event) {
        static_cast<void>(reducer.found_inf());  // the GPU is done; no call has to follow
      } else {
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (!life.expired() && std::chrono::steady_clock::now() < end) reducer.packed().wait();
      }
      EXPECT_TRUE(life.expired());
    }
    static_cast<void>(reducer.found_inf());
  });
}

// A Python array's deleter takes the interpreter's lock, which a thread may hold while it calls the
// Reducer. So owners must be destroyed outside the Reducer's locks.
TEST_P(GpuGradients, AnOwnerMayTakeALockOfTheCallersWhenItDies) {
  constexpr int kParameters = 8;  // and as many buckets
  run_gpu_mesh(GetParam(), [&](const Mesh& mesh) {
    Stream stream = Stream::create(kGpu, "caller");
    const Values gradient(1024, 1.0F);
    std::mutex interpreter;
    std::atomic<int> died = 0;
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    reducer.set_stream(stream);
    register_numbered(reducer, kParameters, 1024);
    for (const KeptUntil until : {KeptUntil::kRead, KeptUntil::kOrdered}) {
      died = 0;
      Microbatch open(reducer, {.last = true});
      for (int p = 0; p < kParameters; ++p) {
        const std::shared_ptr<const void> owner(&gradient, [&](const void* /*data*/) {
          const std::scoped_lock lock(interpreter);
          ++died;
        });
        reducer.gradient_ready(p, view_of(gradient), owner, stream, until);
      }
      open.end();
      for (int i = 0; i < 100 && died < kParameters; ++i) {
        const std::scoped_lock lock(interpreter);
        static_cast<void>(reducer.stats());
      }
      static_cast<void>(reducer.found_inf());
      EXPECT_EQ(died, kParameters);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, GpuGradients,
                         ::testing::Values(MeshShape{1, 1}, MeshShape{1, 2}, MeshShape{2, 1},
                                           MeshShape{2, 2}),
                         ::testing::PrintToStringParamName());

// Work of the caller, such as an all-to-all, after which each rank's stream continues only once the
// other rank's has come there too.
class Rendezvous {
 public:
  void enqueue(int rank, Stream& stream) {
    const auto r = static_cast<std::size_t>(rank);
    came_[r] = stream.record();
    enqueued_[r] = true;
    waiter_[r].run([this, other = 1 - r] {
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (!enqueued_[other] || !came_[other].complete()) {
        if (std::chrono::steady_clock::now() > end) {
          ADD_FAILURE() << "the other rank's stream never came";
          return;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    stream.wait(waiter_[r].record());
  }

 private:
  std::array<Event, 2> came_;
  std::array<std::atomic<bool>, 2> enqueued_{};
  std::array<Stream, 2> waiter_{Stream::host_worker("rank 0 waits"),
                                Stream::host_worker("rank 1 waits")};
};

// Rank 1 does not use all of the first bucket and sends it last. Meanwhile rank 0's stream must not
// wait for the buckets after it.
TEST(GpuGradientsOfOneRank, MayBeMissingWithoutHoldingUpTheOthers) {
  constexpr int kParameters = 24;  // two in a bucket
  Rendezvous rendezvous;
  std::atomic<bool> rank_1_is_there = false;
  run_gpu_mesh({1, 2}, [&](const Mesh& mesh) {
    Stream stream = Stream::create(kGpu, "caller");
    const Values gradient(512, 1.0F);
    Reducer reducer(mesh, {.bucket_bytes = 4096, .missing = Missing::kZero});
    reducer.set_stream(stream);
    register_numbered(reducer, kParameters, 512);
    Microbatch open(reducer, {.last = true});
    for (int p = mesh.rank(); p < kParameters; ++p) {
      reducer.gradient_ready(p, view_of(gradient), std::make_shared<int>(p), stream,
                             KeptUntil::kOrdered);
    }
    if (mesh.rank() == 1) {
      rendezvous.enqueue(1, stream);
      rank_1_is_there = true;
    } else {  // when rank 1 waits for it, and buckets have been sent as far as possible
      while (!rank_1_is_there) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      rendezvous.enqueue(0, stream);
    }
    open.end();
    EXPECT_THAT(read_shard(reducer, "0", stream), Each(0.5F));
    EXPECT_THAT(read_shard(reducer, "5", stream), Each(1.0F));
  });
}

TEST(GpuGradientsOfOneRank, AreSafeWhereAnEventCannotBeMade) {
  run_gpu_mesh({1, 1}, [&](const Mesh& mesh) {
    Stream stream = Stream::create(kGpu, "caller");
    const Values gradient(1024, 1.0F);
    Reducer reducer(mesh);
    reducer.set_stream(stream);
    register_numbered(reducer, 1, 1024);
    // Before the pack is launched, and afterwards.
    for (const ValidAfter& valid : {ValidAfter(stream), ValidAfter(Event())}) {
      auto owner = std::make_shared<int>(1);
      const std::weak_ptr<int> life = owner;
      Microbatch open(reducer, {.last = true});
      {
        const stand_in::Standstill nothing_moves;
        const std::int64_t launches = stand_in::kernel_launches();
        stand_in::fail_call({{.name = "cudaEventCreateWithFlags",
                              .error = cudaErrorMemoryAllocation,
                              .times = stand_in::kAlways}});
        reducer.gradient_ready(0, view_of(gradient), std::exchange(owner, nullptr), valid);
        stand_in::fail_call(std::nullopt);
        EXPECT_EQ(stand_in::kernel_launches(), launches + (valid.stream ? 0 : 1));
        EXPECT_FALSE(life.expired());
      }
      EXPECT_THAT([&] { open.end(); },
                  ThrowsMessage<Error>(HasSubstr("cudaErrorMemoryAllocation")));
      EXPECT_TRUE(life.expired());
    }
    Microbatch open(reducer, {.last = true});
    reducer.gradient_ready(0, view_of(gradient), {}, stream);
    open.end();
    EXPECT_THAT(read_shard(reducer, "0", stream), Each(1.0F));
  });
}

// At the end of a microbatch the caller's streams are free again, even if the GPU is behind.
TEST(GpuGradientsOfOneRank, LeaveTheirStreamsWithTheMicrobatch) {
  constexpr int kParameters = 6;
  run_gpu_mesh({1, 1}, [&](const Mesh& mesh) {
    Stream stream = Stream::create(kGpu, "caller");
    cudaStream_t other = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    const Values gradient(64, 1.0F);
    Reducer reducer(mesh, {.bucket_bytes = 256});
    reducer.set_stream(stream);
    register_numbered(reducer, kParameters, 64);
    {
      const stand_in::Standstill nothing_moves;
      const auto microbatch = [&](bool last, const Stream& from) {
        Microbatch open(reducer, {.last = last});
        for (int p = 0; p < kParameters; ++p) {
          reducer.gradient_ready(p, view_of(gradient), std::make_shared<int>(p), from,
                                 KeptUntil::kOrdered);
        }
        open.end();
      };
      microbatch(false, Stream::borrow(kGpu, other));
      {
        const stand_in::Capture capture(other, false);
        microbatch(true, stream);
      }
      EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
    }
    EXPECT_THAT(read_shard(reducer, "0", stream), Each(2.0F));
  });
}

}  // namespace
}  // namespace hsdp::test
