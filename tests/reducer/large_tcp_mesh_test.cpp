// A mesh of 200 processes without shared memory, within the default limit of open files.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstddef>
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

std::size_t heap_bytes() {
  const struct mallinfo2 info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
}

std::ptrdiff_t count_descriptors() {
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  return std::distance(begin(descriptors), end(descriptors));
}

// Links to the other members of each group that moves data, and the descriptors that a rank needs
// beside them.
constexpr std::ptrdiff_t kLinks =
    (kShape.replicate * kShape.shard - 1) + (kShape.replicate - 1) + (kShape.shard - 1);
constexpr std::ptrdiff_t kDescriptorsBeside = 32;
// The most memory that a group's links hold, however many there are. A count far below it would
// mean that the test measures nothing.
constexpr std::size_t kGroupBytes = std::size_t{16} << 20;

TEST(LargeTcpMesh, TakesMeansAndAStep) {
  const int size = kShape.size();
  const StepCase step = integer_step({{.name = "weight", .shape = {37, 5}, .dtype = Dtype::kF32},
                                      {.name = "bias", .shape = {3}, .dtype = Dtype::kF32}},
                                     size, 1, 6);
  const std::vector<Values> want = reference_results(step, {}, kShape);
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
    const std::size_t before = heap_bytes();
    if (!mean(std::int64_t{1} << 21)) return 4;  // fills every link in both directions
    const std::size_t held = heap_bytes() - before;
    note(std::to_string(held) + " bytes, " + std::to_string(count_descriptors()) + " descriptors");
    if (held > kGroupBytes || held < kGroupBytes / 4) return 5;
    // The control links and watches of the ranks that speak through this one. Rank 0 also has a
    // socket for descriptors to each rank.
    const std::ptrdiff_t control = 2 * 16 + (rank == 0 ? size : 0);
    if (count_descriptors() > kLinks + control + kDescriptorsBeside) return 6;
    reducer.close();
    mesh.world().barrier();
    return 0;
  });
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_TRUE(outcomes[rank].ok())
        << "rank " << rank << ": " << outcomes[rank].exit_code << " " << outcomes[rank].error << " "
        << ::testing::PrintToString(outcomes[rank].notes);
  }
}

}  // namespace
}  // namespace hsdp
