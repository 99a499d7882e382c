// The calls of the CUDA runtime and of NCCL in a step, counted on the stand-ins: a few for each
// bucket, however many parameters it has [Note: one launch for many gradients].
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda_stand_in.h"
#include "hsdp/reducer.h"
#include "nccl_ranks.h"

namespace hsdp::test {
namespace {

using Calls = std::map<std::string, std::int64_t>;

constexpr std::int64_t kBucketElements = 4096;

// Rank 0's calls in a step with that many buckets, from its begin until everything was issued. The
// GPU stands still meanwhile, so that no event is complete by chance.
Calls calls_of_step(MeshShape shape, int buckets, int parameters_in_each) {
  Calls calls;
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    const std::int64_t count = kBucketElements / parameters_in_each;
    const std::vector<float> gradient(static_cast<std::size_t>(count), 1.0F);
    std::vector<float> word(1);
    const Stream theirs = Stream::create(mesh.device(), "theirs");
    const Stream stream = Stream::borrow(mesh.device(), theirs.native_handle());
    Reducer reducer(mesh, {.reduce_dtype = Dtype::kF32,
                           .bucket_bytes = kBucketElements * static_cast<int>(sizeof(float))});
    reducer.set_stream(stream);
    for (int p = 0; p < buckets * parameters_in_each; ++p) {
      reducer.register_parameter({.name = std::to_string(p), .shape = {count}});
    }
    const auto run = [&] {
      Microbatch open(reducer, {.last = true});
      for (int p = 0; p < buckets * parameters_in_each; ++p) {
        const StridedView view{gradient.data(), Dtype::kF32, mesh.device(), {count}, {}};
        reducer.gradient_ready(p, view, std::make_shared<int>(p), stream, KeptUntil::kOrdered);
      }
      open.end();
      reducer.found_inf({word.data(), 1, Dtype::kF32, mesh.device()});
    };
    for (int step = 0; step < 2; ++step) {  // planned calls are compared the first time
      run();
      EXPECT_FALSE(reducer.found_inf());
    }
    EXPECT_EQ(reducer.stats().bucket_count, buckets);
    static_cast<void>(mesh.world().exchange("", "ready"));
    {
      const stand_in::Standstill nothing_moves;
      const Calls before = stand_in::call_counts(mesh.device().index);
      run();
      Calls after = stand_in::call_counts(mesh.device().index);
      for (const auto& [name, earlier] : before) after[name] -= earlier;
      // Waiting threads query again and again, perhaps with another device, and the memory of the
      // previous step is returned.
      for (const char* const name : {"cudaEventQuery", "cudaSetDevice", "cudaEventDestroy"}) {
        after.erase(name);
      }
      // Once for the first gradient of a bucket that is not launched yet, and once for each event
      // recorded on the stream. How often depends on which thread packs what waited for a slot.
      EXPECT_LE(after.extract("cudaStreamIsCapturing").mapped(), 5 * buckets);
      if (mesh.rank() == 0) calls = after;
      static_cast<void>(mesh.world().exchange("", "counted"));
    }
    EXPECT_FALSE(reducer.found_inf());
  });
  return calls;
}

Calls calls_of_bucket(MeshShape shape, int parameters_in_each) {
  constexpr int kFew = 4;
  constexpr int kMany = 8;
  Calls calls = calls_of_step(shape, kMany, parameters_in_each);
  for (const auto& [name, fewer] : calls_of_step(shape, kFew, parameters_in_each)) {
    calls[name] -= fewer;
  }
  std::erase_if(calls, [](const auto& call) { return call.second == 0; });
  for (auto& [name, count] : calls) {
    EXPECT_EQ(count % (kMany - kFew), 0) << name;
    count /= kMany - kFew;
  }
  return calls;
}

// docs/benchmarks.md lists them. A shard group has the reduce-scatter and the sum of its rows, a
// replicate group the two halves of its hop.
struct Listed {
  MeshShape shape;
  Calls calls;
};
const Listed kListed[] = {
    {{1, 2},
     {{"cudaEventCreateWithFlags", 6},
      {"cudaEventRecord", 6},
      {"cudaLaunchKernel", 3},
      {"cudaStreamWaitEvent", 5},
      {"ncclGroupEnd", 1}}},
    {{2, 1},
     {{"cudaEventCreateWithFlags", 5},
      {"cudaEventRecord", 5},
      {"cudaLaunchKernel", 4},
      {"cudaStreamWaitEvent", 4},
      {"ncclGroupEnd", 2}}},
    {{2, 2},
     {{"cudaEventCreateWithFlags", 9},
      {"cudaEventRecord", 9},
      {"cudaLaunchKernel", 6},
      {"cudaStreamWaitEvent", 8},
      {"ncclGroupEnd", 3}}},
};

TEST(CallsOfABucket, AreThoseListedForAnyNumberOfParameters) {
  for (const Listed& listed : kListed) {
    SCOPED_TRACE(::testing::PrintToString(listed.shape));
    for (const int parameters_in_each : {2, 64}) {
      EXPECT_EQ(calls_of_bucket(listed.shape, parameters_in_each), listed.calls);
    }
  }
}

}  // namespace
}  // namespace hsdp::test
