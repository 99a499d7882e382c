// A mesh of 200 processes that share no memory, with the descriptors that a default limit leaves.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "hsdp/mesh.h"
#include "hsdp/reducer.h"
#include "tests/support/process_ranks.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

constexpr MeshShape kShape{.replicate = 100, .shard = 2};

void limit_descriptors() {
  constexpr rlim_t kDefaultLimit = 1024;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min(kDefaultLimit, limit.rlim_max);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

TEST(LargeTcpMesh, TakesMeansAndAStep) {
  const int size = kShape.size();
  const StepCase step = integer_step({{.name = "weight", .shape = {37, 5}, .dtype = Dtype::kF32},
                                      {.name = "bias", .shape = {3}, .dtype = Dtype::kF32}},
                                     size, 1, 6);
  std::vector<Values> want;
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    want.push_back(reference_result(reference_step(step, {}, kShape, p), step.gradients[p]));
  }
  const ProcessOptions options{.deadline = std::chrono::seconds(120),
                               .environment = {{"HSDP_TRANSPORT", "tcp"}}};
  const auto outcomes = run_processes(size, options, [&](int rank) {
    limit_descriptors();
    const Mesh mesh =
        init_mesh({.replicate = kShape.replicate, .shard = kShape.shard, .timeout_s = 110.0});
    const auto mean = [&](std::int64_t count) {
      std::vector<float> x(static_cast<std::size_t>(count), static_cast<float>(rank));
      mesh.world().all_reduce({.data = {x.data(), count}, .divisor = static_cast<float>(size)});
      return x == std::vector<float>(static_cast<std::size_t>(count), 99.5F);
    };
    if (mesh.world().transport() != Transport::kTcp) return 1;
    if (!mean(1)) return 2;
    Reducer reducer(mesh);
    register_all(reducer, step);
    run_step(reducer, step, rank);
    if (gathered(reducer, step) != want) return 3;
    if (!mean(1'000)) return 4;
    if (rank == 0) {
      const std::filesystem::directory_iterator descriptors("/proc/self/fd");
      note(std::to_string(std::distance(begin(descriptors), end(descriptors))));
    }
    reducer.close();
    mesh.world().barrier();
    return 0;
  });
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_TRUE(outcomes[rank].ok())
        << "rank " << rank << ": " << outcomes[rank].exit_code << " " << outcomes[rank].error;
  }
  for (const std::string& descriptors : outcomes[0].notes) {
    RecordProperty("descriptors_of_rank_0", descriptors);
  }
}

}  // namespace
}  // namespace hsdp
