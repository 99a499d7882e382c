// Checks the NCCL engine between processes, and compares the times of its two reductions.
//
// Usage: check_nccl REPLICATE SHARD FOLDER      one process of several, started by nccl_ranks.sh
// RANK and WORLD_SIZE give its rank. FOLDER is empty at the start, and all ranks share it. Each
// rank uses GPU RANK modulo the number of GPUs. Ranks that share a GPU each need a different
// NCCL_HOSTID.
// Exit status: 0 all holds, 1 something does not, 77 there is no GPU or no libnccl.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>

#include "file_control.h"
#include "hsdp/comm/nccl/nccl_library.h"
#include "hsdp/comm/optional_engines.h"
#include "hsdp/device/cuda_call.h"
#include "hsdp/error.h"
#include "nccl_checks.h"

namespace hsdp::gpu {
namespace {

constexpr int kSkipped = 77;
// On a machine that was just started, NCCL takes up to a minute to connect.
constexpr std::chrono::milliseconds kTimeout{120'000};

int variable(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? 0 : std::atoi(text);
}

int run(int replicate, int shard, const char* folder) {
  const int rank = variable("RANK");
  const int size = variable("WORLD_SIZE");
  try {
    require_cuda({DeviceType::kCuda, 0});
    static_cast<void>(comm::NcclLibrary::shared());
  } catch (const UsageError& error) {
    if (rank == 0) std::printf("check_nccl: skipped: %s\n", error.what());
    return kSkipped;
  }
  const Device device{DeviceType::kCuda, rank % cuda_device_count()};
  const auto control = std::make_shared<FileControl>(folder, rank, size, kTimeout);
  Communicator world = comm::nccl_world(control, device);
  try {
    check_nccl_engine(world, replicate, shard, device);
  } catch (const std::exception& error) {
    world.abort(error.what());  // otherwise the other ranks wait for this one
    throw;
  }
  if (rank == 0) {
    std::printf("NCCL %s, %s\n", comm::NcclLibrary::shared()->version().c_str(),
                comm::NcclLibrary::shared()->path().c_str());
  }
  measure_nccl_engine(world, device);
  static_cast<void>(world.exchange("", "end"));
  return 0;
}

}  // namespace
}  // namespace hsdp::gpu

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: check_nccl REPLICATE SHARD FOLDER, by nccl_ranks.sh\n");
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    return hsdp::gpu::run(std::atoi(argv[1]), std::atoi(argv[2]), argv[3]);
  } catch (const std::exception& error) {
    std::printf("FAILED on rank %d: %s\n", hsdp::gpu::variable("RANK"), error.what());
    return 1;
  }
}
