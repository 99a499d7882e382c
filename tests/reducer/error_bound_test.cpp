// The error bound of rule 4 against float64, on gradients for which every extra rounding shows.
#include "tests/support/error_bound.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>

#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

constexpr MeshShape kShape{.replicate = 2, .shard = 4};
constexpr int kMicrobatchCount = 6;
constexpr std::int64_t kCount = 257;

// value(microbatch, rank, element)
using Pattern = std::function<double(int, int, int)>;

struct Hostile {
  std::string name;
  Pattern value;
};

double pseudo_random(int m, int rank, int i) {
  return Random(static_cast<std::uint64_t>((m * 64 + rank) * 4096 + i)).uniform() - 0.5;
}

// One rank of each shard group has a large value first and then ones. Where the spacing of a 16-bit
// type is 2 (bf16 at 256, f16 at 2048) a 16-bit sum loses the ones.
double large_then_ones(double large, int m, int rank) {
  if (rank % kShape.shard != 0) return 0.0;
  return m == 0 ? large : 1.0;
}

std::vector<Hostile> hostile_patterns() {
  return {
      {"random", [](int m, int rank, int i) { return pseudo_random(m, rank, i); }},
      {"256 and ones", [](int m, int rank, int) { return large_then_ones(256.0, m, rank); }},
      {"256, 1, -256",
       [](int m, int, int) { return m % 3 == 0   ? 256.0
                                    : m % 3 == 1 ? 1.0
                                                 : -256.0; }},
      {"2048 and ones", [](int m, int rank, int) { return large_then_ones(2048.0, m, rank); }},
      {"huge next to tiny",
       [](int m, int rank, int i) {
         return pseudo_random(m, rank, i) * ((i + m) % 2 == 0 ? 0x1p10 : 0x1p-13);
       }},
      {"cancelling",
       [](int m, int rank, int i) {
         const double sign = (m + rank) % 2 == 0 ? 1.0 : -1.0;
         return sign * (100.0 + pseudo_random(m, rank, i));
       }},
      {"f16 subnormals",
       [](int m, int rank, int i) { return pseudo_random(m, rank, i) * 0x1p-20; }},
      {"local sums beyond f16", [](int, int, int i) { return 40000.0 + i; }},
  };
}

StepCase hostile_step(const Hostile& hostile, Dtype dtype, std::vector<Sync> schedule) {
  StepCase step{.parameters = {{.name = "w", .shape = {kCount}, .dtype = dtype}},
                .gradients = {Gradients(schedule.size())},
                .schedule = std::move(schedule)};
  for (int m = 0; m < static_cast<int>(step.schedule.size()); ++m) {
    for (int rank = 0; rank < kShape.size(); ++rank) {
      Values values;
      for (int i = 0; i < kCount; ++i) {
        values.push_back(round_to(dtype, static_cast<float>(hostile.value(m, rank, i))));
      }
      step.gradients[0][static_cast<std::size_t>(m)].emplace_back(std::move(values));
    }
  }
  return step;
}

std::vector<std::vector<Sync>> schedules() {
  std::vector<Sync> shards(kMicrobatchCount, Sync::kShard);
  shards.back() = Sync::kAll;
  std::vector<Sync> local(kMicrobatchCount, Sync::kNone);
  local.back() = Sync::kAll;
  std::vector<Sync> mixed = local;
  mixed[2] = Sync::kShard;
  return {shards, local, mixed};
}

class ErrorBound : public testing::TestWithParam<Dtype> {};  // the replica hop's wire

TEST_P(ErrorBound, HoldsOnEveryPattern) {
  std::vector<StepCase> steps;
  std::vector<std::string> labels;
  for (const Hostile& hostile : hostile_patterns()) {
    for (const std::vector<Sync>& schedule : schedules()) {
      steps.push_back(hostile_step(hostile, Dtype::kF32, schedule));
      labels.push_back(hostile.name);
    }
  }
  for (const Dtype reduce : kDtypes) {
    const ReducerOptions options{.reduce_dtype = reduce, .replica_dtype = GetParam()};
    std::vector<std::vector<RankResult>> results(
        steps.size(), std::vector<RankResult>(static_cast<std::size_t>(kShape.size())));
    run_reducers(kShape, steps.front(), options, [&](Reducer& reducer, const Mesh& mesh) {
      for (std::size_t i = 0; i < steps.size(); ++i) {
        results[i][static_cast<std::size_t>(mesh.rank())] =
            run_step(reducer, steps[i], mesh.rank());
        EXPECT_FALSE(reducer.found_inf()) << labels[i];
      }
    });
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const BoundedMean mean =
          bounded_mean(reference_step(steps[i], options, kShape, 0), steps[i].gradients[0]);
      const Values result = joined(results[i], kShape.shard, 0, 0, kCount);
      EXPECT_LE(worst_error_ratio(mean, result), 1.0)
          << labels[i] << " on " << name(reduce) << ", step " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ReplicaWire, ErrorBound, testing::ValuesIn(kDtypes),
                         [](const auto& row) { return std::string(name(row.param)); });

// Why the bound is needed: a carry that is rounded to 16 bits at each microbatch breaks it ...
TEST(ErrorBoundCatches, ASixteenBitCarry) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16}) {
    const double large = dtype == Dtype::kBf16 ? 256.0 : 2048.0;
    const Hostile hostile{"large then ones",
                          [=](int m, int rank, int) { return large_then_ones(large, m, rank); }};
    const StepCase step = hostile_step(hostile, dtype, schedules()[0]);
    const ReferenceStep reference = reference_step(step, {.replica_dtype = Dtype::kF32}, kShape, 0);
    std::vector<Values> carry(static_cast<std::size_t>(kShape.replicate), Values(kCount, 0.0F));
    for (const auto& microbatch : step.gradients[0]) {
      for (std::size_t replica = 0; replica < carry.size(); ++replica) {
        for (std::size_t i = 0; i < carry[replica].size(); ++i) {
          float sum = 0.0F;
          for (std::size_t r = 0; r < 4; ++r) sum += (*microbatch[replica * 4 + r])[i];
          carry[replica][i] = round_to(dtype, carry[replica][i] + round_to(dtype, sum));
        }
      }
    }
    Values rounded;
    for (std::size_t i = 0; i < kCount; ++i) rounded.push_back((carry[0][i] + carry[1][i]) / 8.0F);
    const BoundedMean mean = bounded_mean(reference, step.gradients[0]);
    EXPECT_GT(worst_error_ratio(mean, rounded), 1.0) << name(dtype);
    EXPECT_LE(worst_error_ratio(mean, reference_result(reference, step.gradients[0])), 1.0);
  }
}

// ... and so does a ring that rounds the running sum at every hop.
TEST(ErrorBoundCatches, ASixteenBitRing) {
  const StepCase step =
      hostile_step({"one large rank", [](int, int rank, int) { return rank == 0 ? 256.0 : 1.0; }},
                   Dtype::kBf16, {Sync::kAll});
  const ReferenceStep reference = reference_step(step, {.replica_dtype = Dtype::kF32}, kShape, 0);
  Values ring(kCount, 0.0F);
  for (const auto& values : step.gradients[0][0]) {
    for (std::size_t i = 0; i < ring.size(); ++i) {
      ring[i] = round_to(Dtype::kBf16, ring[i] + (*values)[i]);
    }
  }
  for (float& value : ring) value /= 8.0F;
  const BoundedMean mean = bounded_mean(reference, step.gradients[0]);
  EXPECT_GT(worst_error_ratio(mean, ring), 1.0);
  EXPECT_LE(worst_error_ratio(mean, reference_result(reference, step.gradients[0])), 1.0);
}

// Accumulating after the all-reduce is far outside the bound.
TEST(ErrorBoundCatches, AccumulatingAfterTheAllReduce) {
  const StepCase step =
      hostile_step(hostile_patterns().front(), Dtype::kF32, {Sync::kShard, Sync::kAll});
  const ReferenceStep reference = reference_step(step, {}, kShape, 0);
  const BoundedMean mean = bounded_mean(reference, step.gradients[0]);
  EXPECT_LE(worst_error_ratio(mean, reference_result(reference, step.gradients[0])), 1.0);
  for (int replica = 0; replica < kShape.replicate; ++replica) {
    EXPECT_GT(
        worst_error_ratio(mean, accumulate_after_all_reduce(reference, step.gradients[0], replica)),
        1000.0);
  }
}

}  // namespace
}  // namespace hsdp
