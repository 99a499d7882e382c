// A context takes hundreds of megabytes, so that a rank must have one on its mesh's device alone.
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <vector>

#include "cuda_stand_in.h"
#include "device_world.h"
#include "hsdp/device/buffer.h"
#include "hsdp/reducer.h"
#include "quant/loco_hop.h"
#include "tests/support/reducer_step.h"
#include "zero/adamw.h"
#include "zero/parameter_gather.h"

namespace hsdp {
namespace {

constexpr Device kSecondGpu{DeviceType::kCuda, 1};

// Threads begin with device 0.
TEST(GpuContexts, OfWholeStepsAreOnTheMeshsDeviceAlone) {
  constexpr std::int64_t kCount = 4096;
  stand_in::forget_contexts();
  test::run_ranks(4, [](Communicator& world) {
    const Mesh mesh(stand_in::on_device(world, kSecondGpu),
                    {.replicate = 2, .shard = 2, .device = kSecondGpu});
    const auto hop = std::make_shared<quant::LocoHop>();
    Reducer reducer(mesh, {.replica_hop = hop});
    Stream stream = Stream::create(kSecondGpu, "caller");
    reducer.set_stream(stream);
    reducer.register_parameter({.name = "w", .shape = {kCount}});
    const Buffer memory(kSecondGpu, kCount * sizeof(float));
    const TensorView whole = memory.view(Dtype::kF32);
    const Slice own = reducer.slice("w");
    zero::AdamW optimizer(reducer, {{"w", whole.slice(own.offset, own.count)}});
    zero::ParameterGather gather(reducer, {{.name = "w", .array = whole}});
    const std::vector<float> gradient(kCount, 1.0F);
    for (const bool last : {false, true}) {
      Microbatch open(reducer, {.last = last});
      reducer.gradient_ready("w", {gradient.data(), Dtype::kF32, kSecondGpu, {kCount}, {}});
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
  });
  EXPECT_EQ(stand_in::contexts(), std::set<int>{1});
}

}  // namespace
}  // namespace hsdp
