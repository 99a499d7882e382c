// 64 processes on one host, usually more than it has cores.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "hsdp/mesh.h"
#include "hsdp/reducer.h"
#include "tests/comm/control_outcome.h"

namespace hsdp::test {
namespace {

constexpr int kRanks = 64;
constexpr std::chrono::seconds kDeadline{120};

// As a user's process: root may have more descriptors in flight between processes than the limit.
void drop_capabilities() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct none[2] = {};
  if (::syscall(SYS_capset, &header, none) != 0) throw std::runtime_error("capset");
}

ProcessOptions with_descriptors(rlim_t limit) {
  ProcessOptions options{.deadline = kDeadline};
  options.before = [limit](int /*rank*/) {
    drop_capabilities();
    const rlimit both{limit, limit};
    if (::setrlimit(RLIMIT_NOFILE, &both) != 0) throw std::runtime_error("setrlimit");
  };
  return options;
}

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  // Not counting the descriptor that reads the directory.
  return static_cast<std::size_t>(std::distance(begin(descriptors), end(descriptors))) - 1;
}

void expect_sum_in(Communicator& group) {
  std::vector<float> data(3'000);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i + 1);
  group.all_reduce(TensorView{data.data(), static_cast<std::int64_t>(data.size())});
  for (std::size_t i = 0; i < data.size(); ++i) {
    if (data[i] != static_cast<float>(i + 1) * static_cast<float>(group.size())) {
      throw std::runtime_error("wrong sum");
    }
  }
  // Rings are made when private memory is first copied.
  std::vector<float> all(static_cast<std::size_t>(group.size()));
  const auto own = static_cast<float>(group.rank());
  group.all_gather(ConstTensorView(&own, 1, Dtype::kF32), TensorView{all.data(), group.size()});
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] != static_cast<float>(r)) throw std::runtime_error("wrong row");
  }
}

void expect_step(const Mesh& mesh) {
  Reducer reducer(mesh, {.bucket_bytes = 64 << 10});
  std::vector<float> gradient(50'000, 1.0F);
  reducer.register_parameter({.name = "w", .shape = {50'000}});
  for (const bool last : {false, true}) {
    reducer.begin_microbatch({.last = last});
    reducer.gradient_ready("w", {.data = gradient.data(), .shape = {50'000}});
    reducer.end_microbatch();
  }
  const TensorView shard = reducer.shard("w");
  for (std::int64_t i = 0; i < shard.count; ++i) {
    if (static_cast<const float*>(shard.data)[i] != 2.0F) throw std::runtime_error("wrong mean");
  }
  reducer.close();
}

// Everything that 64 ranks open stays within a quarter of a user's usual limit.
TEST(LargeHost, AMeshItsGroupsAndAStepTakeFewDescriptors) {
  const auto outcomes = run_processes(kRanks, with_descriptors(256), [](int rank) {
    const Mesh mesh = init_mesh({.replicate = 8, .shard = 8, .engine = "host", .timeout_s = 60.0});
    for (Communicator* group : {&mesh.world(), &mesh.shard_group(), &mesh.replicate_group()}) {
      if (group->transport() != Transport::kSharedMemory) return 1;
      expect_sum_in(*group);
    }
    expect_step(mesh);
    // A control link and a watch for each rank that speaks to this one, up to 16. Rank 0 also has a
    // socket for descriptors to each other rank. Mapped memory needs no descriptor.
    const std::size_t for_peers = rank < 4 ? 2 * 16 + (rank == 0 ? kRanks - 1 : 0) : 0;
    constexpr std::size_t kForItself = 16;
    const std::size_t open = open_descriptors();
    if (open > for_peers + kForItself) note(std::to_string(open) + " are open");
    mesh.world().barrier();
    return 0;
  });
  comm::expect_all_ok(outcomes);
  for (const RankOutcome& outcome : outcomes) EXPECT_THAT(outcome.notes, testing::IsEmpty());
}

}  // namespace
}  // namespace hsdp::test
