#include "hsdp/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <ostream>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::HasSubstr;

TEST(Mesh, NumbersRanksByReplicaThenShardAndSoItsGroups) {
  run_mesh({.replicate = 2, .shard = 3}, [](const Mesh& mesh) {
    EXPECT_EQ(mesh.size(), 6);
    EXPECT_EQ(mesh.replicate_size(), 2);
    EXPECT_EQ(mesh.shard_size(), 3);
    EXPECT_EQ(mesh.rank(), mesh.replica() * 3 + mesh.shard_rank());
    EXPECT_EQ(mesh.world().rank(), mesh.rank());
    EXPECT_EQ(mesh.shard_group().rank(), mesh.shard_rank());
    EXPECT_EQ(mesh.shard_group().size(), 3);
    EXPECT_EQ(mesh.replicate_group().rank(), mesh.replica());
    EXPECT_EQ(mesh.replicate_group().size(), 2);
    EXPECT_FALSE(mesh.closed());
    double in_shard_group = mesh.rank();
    double in_replicate_group = mesh.rank();
    mesh.shard_group().all_reduce(TensorView{&in_shard_group, 1, Dtype::kF64, {}});
    mesh.replicate_group().all_reduce(TensorView{&in_replicate_group, 1, Dtype::kF64, {}});
    EXPECT_EQ(in_shard_group, mesh.replica() * 9 + 3);
    EXPECT_EQ(in_replicate_group, 2 * mesh.shard_rank() + 3);
  });
}

// The timeout is the world's: a second mesh that asks for another one reports the world's.
TEST(Mesh, TellsTheTimeoutOfItsWorld) {
  const ThreadRanksOptions options{.timeout = std::chrono::milliseconds(12'500)};
  const auto body = [](const Mesh& mesh) { EXPECT_EQ(mesh.timeout_s(), 12.5); };
  run_mesh({.replicate = 1, .shard = 2}, body, options);
}

// Every rank asks for the same impossible mesh and gets a UsageError that says what is wrong. The
// world stays usable.
struct Misuse {
  std::string label;
  MeshOptions options;
  std::string text;
};

void PrintTo(const Misuse& misuse, std::ostream* out) { *out << misuse.label; }

class MeshMisuse : public testing::TestWithParam<Misuse> {};

TEST_P(MeshMisuse, IsAUsageErrorAndTheWorldGoesOn) {
  run_ranks(4, [](Communicator& world) {
    EXPECT_THAT(caught<UsageError>([&] { const Mesh mesh(world, GetParam().options); }),
                says(HasSubstr(GetParam().text)));
    const Mesh mesh(world, {.replicate = 2, .shard = 2});
    EXPECT_EQ(mesh.size(), 4);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Misuses, MeshMisuse,
    testing::Values(
        Misuse{"too_small", {.replicate = 1, .shard = 2}, "4"},
        Misuse{"too_large", {.replicate = 3, .shard = 2}, "4"},
        Misuse{"product_beyond_int", {.replicate = 4, .shard = 1'073'741'825}, "1073741825"},
        Misuse{"zero", {.replicate = 0, .shard = 4}, "0"},
        Misuse{"negative", {.replicate = -2, .shard = -2}, "-2"},
        Misuse{"out_of_range", {.replicate = 2, .shard = 2, .ranks = {{0, 1}, {2, 4}}}, "4"},
        Misuse{"negative_rank", {.replicate = 2, .shard = 2, .ranks = {{0, 1}, {2, -1}}}, "-1"},
        Misuse{"twice", {.replicate = 2, .shard = 2, .ranks = {{0, 1}, {2, 2}}}, "2"},
        Misuse{"wrong_row_count", {.replicate = 2, .shard = 2, .ranks = {{0, 1, 2, 3}}}, "ranks"},
        Misuse{"engine", {.replicate = 2, .shard = 2, .engine = "foo"}, "'foo'"},
        Misuse{"device",
               {.replicate = 2, .shard = 2, .device = {.type = DeviceType::kCuda}},
               "cuda:0"},
        Misuse{"host_device_index",
               {.replicate = 2, .shard = 2, .device = {.index = 3}},
               "expected index 0 of the cpu, got 3"},
        Misuse{"timeout_huge",
               {.replicate = 2, .shard = 2, .timeout_s = 1e300},
               "timeout_s: expected 0.001 to 1000000 seconds, got 1e+300"},
        Misuse{"ragged", {.replicate = 2, .shard = 2, .ranks = {{0, 1, 2}, {3}}}, "ranks"}),
    [](const auto& row) { return row.param.label; });

// Refused before anything connects, and without a launcher.
TEST(InitMesh, RefusesATimeoutThatNoClockHolds) {
  for (const double timeout_s : {1e300, 1e18, 1e-9, 0.0, -1.0, double{NAN}}) {
    EXPECT_THAT(caught<UsageError>([&] { const Mesh mesh = init_mesh({.timeout_s = timeout_s}); }),
                says(HasSubstr("mesh: timeout_s: expected")));
  }
}

TEST(MeshRanks, WithoutThisRankAreAnError) {
  run_ranks(3, [](Communicator& world) {
    const MeshOptions options{.replicate = 1, .shard = 2, .ranks = {{0, 1}}};
    if (world.rank() == 2) {
      EXPECT_THROW(Mesh(world, options), UsageError);
    } else {
      EXPECT_THAT(caught<MismatchError>([&] { const Mesh mesh(world, options); }), names({2}));
    }
  });
}

TEST(MeshRanks, ThatDisagreeAreAMismatch) {
  run_ranks(4, [](Communicator& world) {
    const bool odd = world.rank() == 2;
    const MeshOptions options{.replicate = odd ? 4 : 2, .shard = odd ? 1 : 2};
    EXPECT_THROW(Mesh(world, options), MismatchError);
  });
}

TEST(MeshRanks, OverlappingArraysAreAMismatch) {
  run_ranks(4, [](Communicator& world) {
    const std::vector<int> row =
        world.rank() < 2 ? std::vector<int>{0, 1} : std::vector<int>{world.rank(), 1};
    const MeshOptions options{.replicate = 1, .shard = 2, .ranks = {row}};
    // Ranks 0 and 1 agree with each other, but the other ranks will not join their split.
    EXPECT_THROW(Mesh(world, options), MismatchError);
  });
}

// Two meshes in one job, each with its own numbering, reduce at the same time.
TEST(MeshRanks, SeveralMeshesInOneJob) {
  const std::vector<std::vector<int>> first{{5, 1}, {3, 0}};
  const std::vector<std::vector<int>> second{{2}, {4}};
  const std::vector<Sync> schedule{Sync::kShard, Sync::kAll};
  const StepCase first_step = random_step(odd_parameters(Dtype::kBf16), 4, schedule, 1);
  const StepCase second_step = random_step(odd_parameters(Dtype::kF32), 2, schedule, 2);
  run_ranks(6, [&](Communicator& job) {
    const bool in_second = job.rank() == 2 || job.rank() == 4;
    const auto& ranks = in_second ? second : first;
    const MeshShape shape{2, in_second ? 1 : 2};
    const Mesh mesh(job, {.replicate = 2, .shard = shape.shard, .ranks = ranks});
    EXPECT_EQ(ranks[static_cast<std::size_t>(mesh.replica())]
                   [static_cast<std::size_t>(mesh.shard_rank())],
              job.rank());
    EXPECT_EQ(mesh.rank(), mesh.replica() * mesh.shard_size() + mesh.shard_rank());
    const StepCase& step = in_second ? second_step : first_step;
    Reducer reducer(mesh, {.bucket_bytes = 1 << 10});
    register_all(reducer, step);
    run_step(reducer, step, mesh.rank());
    expect_same_bits(gathered(reducer, step), reference_results(step, {}, shape),
                     to_string(shape) + " of six");
  });
}

TEST(Mesh, AfterCloseEveryUseIsAnError) {
  run_mesh({.replicate = 1, .shard = 2}, [](const Mesh& mesh) {
    Mesh copy = mesh;
    Reducer before(mesh);
    before.register_parameter({.name = "w", .shape = {4}});
    copy.close();
    copy.close();
    EXPECT_TRUE(mesh.closed());
    EXPECT_THROW(static_cast<void>(mesh.world()), UsageError);
    EXPECT_THROW(Reducer{mesh}, UsageError);
    const std::vector<float> ones(4, 1.0F);  // the mesh made before still works
    before.begin_microbatch({.last = true});
    before.gradient_ready("w", {.data = ones.data(), .shape = {4}});
    before.end_microbatch();
    EXPECT_EQ(before.shard("w").count, 2);
    EXPECT_EQ(before.grad_norm(), 2.0);
  });
}

}  // namespace
}  // namespace hsdp
