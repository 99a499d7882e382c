// Ranks of a world on the NCCL engine, as threads, each with a GPU of the stand-in.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/control.h"
#include "nccl_stand_in.h"
#include "tests/support/reducer_step.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::test {

[[nodiscard]] stand_in::NcclStandIn& nccl_stand_in();
// From now on that rank's ncclCommRegister fails.
void refuse_registration(int rank);
// Waits for ten seconds at most until it holds. Returns whether it does.
[[nodiscard]] bool soon(const std::function<bool()>& holds);
// What every run of ranks in this file ends with.
void expect_no_race();
// While it lives, NCCL_LAUNCH_ORDER_IMPLICIT is 1, and launches on one device must not race.
class LaunchOrderCounts {
 public:
  LaunchOrderCounts();
  ~LaunchOrderCounts();
  LaunchOrderCounts(const LaunchOrderCounts&) = delete;
  LaunchOrderCounts& operator=(const LaunchOrderCounts&) = delete;
};
[[nodiscard]] Device gpu_of(int rank);
[[nodiscard]] Mesh mesh_of(const Communicator& world, MeshShape shape);
[[nodiscard]] std::shared_ptr<comm::Control> control_of(const Communicator& world);

// try_ranks() with a world of the NCCL engine. First makes the stand-in forget earlier tests and
// then runs `prepare`, which configures it.
[[nodiscard]] std::vector<std::exception_ptr> try_nccl_ranks(
    int size, const RankBody& body, const ThreadRanksOptions& options = {},
    const std::function<void()>& prepare = {});
void run_nccl_ranks(int size, const RankBody& body, const ThreadRanksOptions& options = {});
void run_nccl_mesh(MeshShape shape, const MeshBody& body, const ThreadRanksOptions& options = {});
// What the body returns on each rank.
[[nodiscard]] std::vector<RankResult> nccl_results(
    MeshShape shape, const std::function<RankResult(const Mesh&)>& body);

}  // namespace hsdp::test
