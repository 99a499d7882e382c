// Integer-valued gradients: the mean is the exact sum divided once, whatever the mesh, wire,
// layout, bucket size, number of microbatches and transport.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

constexpr int kMaxMicrobatchCount = 5;
constexpr std::array<Layout, 3> kLayouts{Layout::kFlat, Layout::kDim0, Layout::kWhole};
constexpr std::array<std::int64_t, 4> kBucketBytes{1 << 10, 3000, 16 << 10, 32 << 20};

// Sums of the first `microbatch_count` microbatches, exact in int64, divided once.
Values exact_mean(const Gradients& gradients, int microbatch_count) {
  const std::size_t count = gradients[0][0]->size();
  std::vector<std::int64_t> sums(count, 0);
  for (int m = 0; m < microbatch_count; ++m) {
    for (const auto& values : gradients[static_cast<std::size_t>(m)]) {
      for (std::size_t i = 0; i < count; ++i) sums[i] += static_cast<std::int64_t>((*values)[i]);
    }
  }
  Values mean;
  for (const std::int64_t sum : sums) {
    mean.push_back(static_cast<float>(sum) / static_cast<float>(gradients[0].size()));
  }
  return mean;
}

void expect_exact(std::span<const RankResult> ranks, const StepCase& step, MeshShape shape,
                  int microbatch_count, const std::string& label) {
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    const Values want = exact_mean(step.gradients[p], microbatch_count);
    for (int replica = 0; replica < shape.replicate; ++replica) {
      const Values got =
          joined(ranks, shape.shard, replica, p, element_count(step.parameters[p].shape));
      ASSERT_EQ(got.size(), want.size()) << label;
      for (std::size_t i = 0; i < got.size(); ++i) {
        // Compares by value: a sum of zeros may have either sign.
        ASSERT_EQ(got[i], want[i]) << label << ", parameter " << step.parameters[p].name
                                   << ", replica " << replica << ", element " << i;
      }
    }
  }
}

struct Combination {
  ReducerOptions options;
  Dtype dtype = Dtype::kF32;
  std::vector<int> microbatch_counts;  // of the steps, which all run through one Reducer
};

std::string label_of(const Combination& combination, int microbatch_count) {
  return std::string(name(combination.dtype)) + " " +
         std::string(name(combination.options.layout)) + " buckets of " +
         std::to_string(combination.options.bucket_bytes.value_or(0)) + ", " +
         std::to_string(microbatch_count) + " microbatches";
}

void check_combination(MeshShape shape, const Combination& combination,
                       const ThreadRanksOptions& ranks) {
  const std::vector<int>& counts = combination.microbatch_counts;
  const StepCase step =
      integer_step(odd_parameters(combination.dtype), shape.size(), std::ranges::max(counts), 7);
  std::vector<std::vector<RankResult>> results(
      counts.size(), std::vector<RankResult>(static_cast<std::size_t>(shape.size())));
  run_reducers(
      shape, step, combination.options,
      [&](Reducer& reducer, const Mesh& mesh) {
        for (std::size_t i = 0; i < counts.size(); ++i) {
          for (int m = 0; m < counts[i]; ++m) {
            run_microbatch(reducer, step, m, mesh.rank(), {.last = m + 1 == counts[i]});
          }
          results[i][static_cast<std::size_t>(mesh.rank())] = read_result(reducer, step);
        }
      },
      ranks);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    expect_exact(results[i], step, shape, counts[i], label_of(combination, counts[i]));
  }
}

std::vector<MeshShape> every_mesh(int max_size) {
  std::vector<MeshShape> shapes;
  for (int size = 1; size <= max_size; ++size) {
    for (int shard = 1; shard <= size; ++shard) {
      if (size % shard == 0) shapes.push_back({.replicate = size / shard, .shard = shard});
    }
  }
  return shapes;
}

class ExactSum : public testing::TestWithParam<MeshShape> {};

// Every dtype with every layout on every mesh. Bucket sizes and numbers of microbatches rotate, so
// that each pair of them meets on some mesh.
TEST_P(ExactSum, InProcess) {
  const MeshShape shape = GetParam();
  int turn = shape.replicate + shape.shard;
  for (const Dtype dtype : kDtypes) {
    for (const Layout layout : kLayouts) {
      const std::int64_t bucket_bytes =
          kBucketBytes[static_cast<std::size_t>(turn) % kBucketBytes.size()];
      const int count = 1 + turn++ % kMaxMicrobatchCount;
      check_combination(shape,
                        {{.layout = layout, .bucket_bytes = bucket_bytes},
                         dtype,
                         {count, kMaxMicrobatchCount + 1 - count}},
                        {});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(ExactSum, OverTcp) {
  const MeshShape shape = GetParam();
  auto turn = static_cast<std::size_t>(3 * shape.replicate + shape.shard);
  for (const Dtype dtype : kDtypes) {
    const std::int64_t bucket_bytes = kBucketBytes[turn % kBucketBytes.size()];
    const Layout layout = kLayouts[turn++ % kLayouts.size()];
    check_combination(shape, {{.layout = layout, .bucket_bytes = bucket_bytes}, dtype, {2}},
                      {.transport = TransportChoice::kTcp});
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(EveryMesh, ExactSum, testing::ValuesIn(every_mesh(8)),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace hsdp
