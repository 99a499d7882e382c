// The checks that ranks on a GPU run, on the stand-ins, with the Control that those ranks have.
#include "nccl_checks.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "file_control.h"
#include "hsdp/comm/optional_engines.h"
#include "nccl_ranks.h"
#include "tests/comm/rank_threads.h"

namespace hsdp::test {
namespace {

class NcclChecks : public ::testing::TestWithParam<MeshShape> {};

TEST_P(NcclChecks, Hold) {
  const MeshShape shape = GetParam();
  nccl_stand_in().reset();
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() /
      ("hsdp-checks-" + std::to_string(::getpid()) + "-" + to_string(shape));
  run_each(static_cast<std::size_t>(shape.size()), [&](std::size_t r) {
    const int rank = static_cast<int>(r);
    const auto control = std::make_shared<gpu::FileControl>(folder, rank, shape.size(),
                                                            std::chrono::milliseconds(60'000));
    Communicator world = comm::nccl_world(control, gpu_of(rank));
    gpu::check_nccl_engine(world, shape.replicate, shape.shard, gpu_of(rank));
  });
  std::filesystem::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(Meshes, NcclChecks,
                         ::testing::Values(MeshShape{1, 2}, MeshShape{2, 1}, MeshShape{2, 2}),
                         [](const auto& chosen) { return "mesh_" + to_string(chosen.param); });

}  // namespace
}  // namespace hsdp::test
