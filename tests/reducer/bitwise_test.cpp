// Random gradients: every schedule and mix of dtypes gives the reference's bits, and only inputs,
// mesh shape, wire dtypes and schedule decide them.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <cstring>

#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

struct Schedule {
  std::vector<Sync> syncs;
  bool finish = false;
};

// Every sequence of none and shard of up to `length` microbatches, ended by all or by finish().
std::vector<Schedule> every_schedule(int length) {
  std::vector<Schedule> schedules;
  for (int m = 0; m <= length; ++m) {
    for (unsigned bits = 0; bits < (1U << m); ++bits) {
      Schedule schedule;
      for (int i = 0; i < m; ++i) {
        schedule.syncs.push_back((bits >> i & 1U) == 0U ? Sync::kShard : Sync::kNone);
      }
      if (m > 0) schedules.push_back({.syncs = schedule.syncs, .finish = true});
      schedule.syncs.push_back(Sync::kAll);
      if (m < length) schedules.push_back(schedule);
    }
  }
  return schedules;
}

// One parameter for every gradient dtype on every wire, of odd sizes.
std::vector<ParameterSpec> every_wire() {
  std::vector<ParameterSpec> parameters;
  for (const Dtype gradient : kDtypes) {
    for (const Dtype reduce : kDtypes) {
      const auto n = static_cast<std::int64_t>(parameters.size());
      parameters.push_back(
          {.name = std::string(name(gradient)) + " on " + std::string(name(reduce)),
           .shape = {7 + 5 * n, 1 + n % 4},
           .dtype = gradient,
           .reduce_dtype = reduce});
    }
  }
  return parameters;
}

// Missing gradients at random, but each parameter has one on some rank.
void punch_holes(StepCase& step, std::uint64_t seed) {
  Random random(seed);
  for (Gradients& gradients : step.gradients) {
    for (auto& microbatch : gradients) {
      for (std::size_t rank = 0; rank < microbatch.size(); ++rank) {
        const bool keep = &microbatch == &gradients.front() && rank == 0;
        if (!keep && random.integer(0, 3) == 0) microbatch[rank].reset();
      }
    }
  }
}

std::vector<StepCase> steps_of_every_schedule(int world_size, int length, bool holes) {
  std::vector<StepCase> steps;
  for (const Schedule& schedule : every_schedule(length)) {
    StepCase step = random_step(every_wire(), world_size, schedule.syncs, 100 + steps.size());
    step.finish = schedule.finish;
    if (holes) punch_holes(step, steps.size());
    steps.push_back(std::move(step));
  }
  return steps;
}

// Runs the steps through one Reducer and compares each with the reference.
void check_steps(MeshShape shape, const ReducerOptions& options, const std::vector<StepCase>& steps,
                 const ThreadRanksOptions& ranks = {}, const Delivery& delivery = {}) {
  std::vector<std::vector<RankResult>> results(
      steps.size(), std::vector<RankResult>(static_cast<std::size_t>(shape.size())));
  run_mesh(
      shape,
      [&](const Mesh& mesh) {
        Reducer reducer(mesh, options);
        register_all(reducer, steps.front());
        for (std::size_t i = 0; i < steps.size(); ++i) {
          results[i][static_cast<std::size_t>(mesh.rank())] =
              run_step(reducer, steps[i], mesh.rank(), delivery);
        }
      },
      ranks);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    expect_reference(results[i], steps[i], options, shape, "step " + std::to_string(i));
    if (testing::Test::HasFatalFailure()) return;
  }
}

class Bitwise : public testing::TestWithParam<MeshShape> {};

TEST_P(Bitwise, EveryScheduleOnEveryWire) {
  const MeshShape shape = GetParam();
  const std::vector<StepCase> steps = steps_of_every_schedule(shape.size(), 3, false);
  const std::array<std::optional<Dtype>, 4> replica_dtypes{std::nullopt, Dtype::kF32, Dtype::kBf16,
                                                           Dtype::kF16};
  constexpr std::array kLayouts{Layout::kFlat, Layout::kDim0, Layout::kWhole};
  for (std::size_t i = 0; i < replica_dtypes.size(); ++i) {
    for (const ShardOver shard_over : {ShardOver::kShard, ShardOver::kMesh}) {
      if (shard_over == ShardOver::kMesh && shape.replicate == 1) continue;
      const ReducerOptions options{.replica_dtype = replica_dtypes[i],
                                   .layout = kLayouts[i % kLayouts.size()],
                                   .bucket_bytes = i < 2 ? 1 << 10 : 1 << 20,
                                   .shard_over = shard_over};
      check_steps(shape, options, steps);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Bitwise, HolesAreZeros) {
  const MeshShape shape = GetParam();
  const std::vector<StepCase> steps = steps_of_every_schedule(shape.size(), 2, true);
  check_steps(shape, {.bucket_bytes = 1 << 10, .missing = Missing::kZero}, steps);
}

TEST_P(Bitwise, LocalSumsInTheGradientDtype) {
  const MeshShape shape = GetParam();
  const std::vector<StepCase> steps = steps_of_every_schedule(shape.size(), 3, false);
  check_steps(shape, {.accumulate_dtype = AccumulateDtype::kParam}, steps);
}

INSTANTIATE_TEST_SUITE_P(Meshes, Bitwise,
                         testing::Values(MeshShape{1, 1}, MeshShape{1, 3}, MeshShape{3, 1},
                                         MeshShape{2, 2}, MeshShape{2, 3}, MeshShape{3, 2}),
                         testing::PrintToStringParamName());

// Changes, one at a time, everything that must not change a bit of the result.
constexpr MeshShape kTwoByThree{.replicate = 2, .shard = 3};

std::vector<StepCase> odd_step(Dtype dtype) {
  return {random_step(odd_parameters(dtype), kTwoByThree.size(),
                      {Sync::kShard, Sync::kNone, Sync::kAll}, 3)};
}

TEST(Unchanged, ByBucketSizeLayoutAndTransport) {
  for (const Dtype dtype : kDtypes) {
    for (const TransportChoice transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
      for (const std::int64_t bucket_bytes : {1 << 10, 5000, 32 << 20}) {
        for (const Layout layout : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
          check_steps(kTwoByThree, {.layout = layout, .bucket_bytes = bucket_bytes},
                      odd_step(dtype), {.transport = transport});
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

// A gradient in read-only pages: a write to it would crash the process.
TEST(Unchanged, ByReadOnlyMemory) {
  const StepCase step = random_step({{.name = "w", .shape = {512}}}, kTwoByThree.size(),
                                    {Sync::kNone, Sync::kShard, Sync::kAll}, 10);
  expect_result(kTwoByThree, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    constexpr std::size_t kPage = 4096;
    for (std::size_t m = 0; m < step.schedule.size(); ++m) {
      void* const page =
          ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      ASSERT_NE(page, MAP_FAILED);
      const auto rank = static_cast<std::size_t>(mesh.rank());
      std::memcpy(page, step.gradients[0][m][rank]->data(), 512 * sizeof(float));
      ASSERT_EQ(::mprotect(page, kPage, PROT_READ), 0);
      reducer.begin_microbatch({.sync = step.schedule[m]});
      reducer.gradient_ready("w", {.data = page, .shape = {512}});
      reducer.end_microbatch();
      ::munmap(page, kPage);  // everything is packed: nothing reads it any more
    }
  });
}

}  // namespace
}  // namespace hsdp
