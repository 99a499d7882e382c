#include "nccl_ranks.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <utility>

#include "cuda_stand_in.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/optional_engines.h"
#include "tests/support/engine_around.h"

namespace hsdp::test {
namespace {

constexpr int kGpus = 8;

class HostViews : public EngineAround {
 public:
  HostViews(std::shared_ptr<Communicator::Engine> nccl, Device device)
      : EngineAround(std::move(nccl)), device_(device) {}

  void reduce_scatter(const ReduceScatter& args, Stream& stream) override {
    ReduceScatter same = args;
    same.in.device = same.out.device = device_;
    inner()->reduce_scatter(same, stream);
  }
  void all_reduce(const AllReduce& args, Stream& stream) override {
    AllReduce same = args;
    same.data.device = device_;
    inner()->all_reduce(same, stream);
  }
  void all_gather(ConstTensorView in, TensorView out, const RowCut& cut, int bucket,
                  Stream& stream) override {
    in.device = out.device = device_;
    inner()->all_gather(in, out, cut, bucket, stream);
  }
  void all_to_all(ConstTensorView in, TensorView out, const RowCut& cut, int bucket,
                  Stream& stream) override {
    in.device = out.device = device_;
    inner()->all_to_all(in, out, cut, bucket, stream);
  }
  void broadcast(TensorView data, int root, Stream& stream) override {
    data.device = device_;
    inner()->broadcast(data, root, stream);
  }
  void barrier(Stream& stream) override { inner()->barrier(stream); }
  [[nodiscard]] std::shared_ptr<Engine> split(int color, int key) override {
    auto part = inner()->split(color, key);
    if (part == nullptr) return nullptr;
    return std::make_shared<HostViews>(std::move(part), device_);
  }
  [[nodiscard]] SharedMemory allocate(std::int64_t count, Dtype dtype) override {
    const SharedMemory memory = inner()->allocate(count, dtype);
    TensorView view = memory.view();
    EXPECT_EQ(view.device, device_);
    view.device = {};
    return SharedMemory(memory.owner(), view);
  }

 private:
  Device device_;
};

}  // namespace

stand_in::NcclStandIn& nccl_stand_in() {
  static stand_in::NcclStandIn* const library = [] {
    stand_in::set_devices(kGpus);
    ::setenv("HSDP_NCCL_LIBRARY", HSDP_NCCL_STAND_IN, 1);
    void* const file = ::dlopen(HSDP_NCCL_STAND_IN, RTLD_NOW | RTLD_LOCAL);
    if (file == nullptr) throw std::runtime_error(::dlerror());
    return reinterpret_cast<decltype(&hsdp_nccl_stand_in)>(::dlsym(file, "hsdp_nccl_stand_in"))();
  }();
  return *library;
}

void expect_no_race() {
  EXPECT_EQ(nccl_stand_in().races(), 0) << "host threads in NCCL at once, or before it had settled";
}

LaunchOrderCounts::LaunchOrderCounts() { ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1); }
LaunchOrderCounts::~LaunchOrderCounts() { ::unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT"); }

Device gpu_of(int rank) { return {DeviceType::kCuda, rank}; }

std::shared_ptr<comm::Control> control_of(const Communicator& world) {
  return {world.engine(), &world.engine()->control()};
}

std::vector<std::exception_ptr> try_nccl_ranks(int size, const RankBody& body,
                                               const ThreadRanksOptions& options,
                                               const std::function<void()>& prepare) {
  nccl_stand_in().reset();
  if (prepare) prepare();
  auto errors = try_ranks(
      size,
      [&](Communicator& host) {
        Communicator world = comm::nccl_world(control_of(host), gpu_of(host.rank()));
        body(world);
      },
      options);
  expect_no_race();
  return errors;
}

void run_nccl_ranks(int size, const RankBody& body, const ThreadRanksOptions& options) {
  nccl_stand_in().reset();
  run_ranks(
      size,
      [&](Communicator& host) {
        Communicator world = comm::nccl_world(control_of(host), gpu_of(host.rank()));
        body(world);
      },
      options);
  expect_no_race();
}

void run_nccl_mesh(MeshShape shape, const MeshBody& body, const ThreadRanksOptions& options) {
  run_nccl_ranks(
      shape.size(),
      [&](Communicator& world) {
        const Mesh mesh(
            world,
            {.replicate = shape.replicate, .shard = shape.shard, .device = gpu_of(world.rank())});
        body(mesh);
      },
      options);
}

Communicator with_host_views(const Communicator& nccl, Device device) {
  return Communicator(std::make_shared<HostViews>(nccl.engine(), device));
}

}  // namespace hsdp::test
