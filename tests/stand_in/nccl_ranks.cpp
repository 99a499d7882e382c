#include "nccl_ranks.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "cuda_stand_in.h"
#include "hsdp/comm/engine.h"
#include "hsdp/comm/optional_engines.h"
#include "tests/stand_in/nccl/nccl.h"

namespace hsdp::test {
namespace {

constexpr int kGpus = 8;

RankBody on_nccl(const RankBody& body) {
  return [&body](Communicator& host) {
    Communicator world = comm::nccl_world(control_of(host), gpu_of(host.rank()));
    body(world);
  };
}

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

void refuse_registration(int rank) {
  nccl_stand_in().fail_call({.rank = rank,
                             .name = "ncclCommRegister",
                             .result = ncclSystemError,
                             .times = stand_in::kAlways});
}

bool soon(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!holds() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return holds();
}

void expect_no_race() {
  EXPECT_EQ(nccl_stand_in().races(), 0) << "host threads in NCCL at once, or before it had settled";
}

LaunchOrderCounts::LaunchOrderCounts() { ::setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1); }
LaunchOrderCounts::~LaunchOrderCounts() { ::unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT"); }

Device gpu_of(int rank) { return {DeviceType::kCuda, rank}; }

Mesh mesh_of(const Communicator& world, MeshShape shape) {
  return Mesh(world,
              {.replicate = shape.replicate, .shard = shape.shard, .device = gpu_of(world.rank())});
}

std::shared_ptr<comm::Control> control_of(const Communicator& world) {
  return {world.engine(), &world.engine()->control()};
}

std::vector<std::exception_ptr> try_nccl_ranks(int size, const RankBody& body,
                                               const ThreadRanksOptions& options,
                                               const std::function<void()>& prepare) {
  nccl_stand_in().reset();
  if (prepare) prepare();
  auto errors = try_ranks(size, on_nccl(body), options);
  expect_no_race();
  return errors;
}

void run_nccl_ranks(int size, const RankBody& body, const ThreadRanksOptions& options) {
  nccl_stand_in().reset();
  run_ranks(size, on_nccl(body), options);
  expect_no_race();
}

void run_nccl_mesh(MeshShape shape, const MeshBody& body, const ThreadRanksOptions& options) {
  run_nccl_ranks(
      shape.size(), [&](Communicator& world) { body(mesh_of(world, shape)); }, options);
}

std::vector<RankResult> nccl_results(MeshShape shape,
                                     const std::function<RankResult(const Mesh&)>& body) {
  std::vector<RankResult> results(static_cast<std::size_t>(shape.size()));
  run_nccl_mesh(shape, [&](const Mesh& mesh) {
    results[static_cast<std::size_t>(mesh.rank())] = body(mesh);
  });
  return results;
}

}  // namespace hsdp::test
