// verify_every: results that differ between replicas are found, named, and never returned.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/flipping_hop.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::HasSubstr;
using When = FlippingHop::When;

constexpr MeshShape kShape{3, 2};
constexpr std::int64_t kBucketBytes = 512;

StepCase some_step(MeshShape shape) {
  return integer_step({{.name = "first", .shape = {100}},
                       {.name = "wide", .shape = {30}, .dtype = Dtype::kF64},
                       {.name = "last", .shape = {300}}},
                      shape.size(), 1, 3);
}

ReducerOptions options_of(std::int64_t every, std::shared_ptr<ReplicaHop> hop = nullptr) {
  ReducerOptions options;
  options.bucket_bytes = kBucketBytes;
  options.verify_every = every;
  options.replica_hop = std::move(hop);
  return options;
}

// Runs steps on every rank, with a bit flipped on one of them, until reading a result fails.
void expect_flip(MeshShape shape, int flipping_rank, const FlippingHop::Flip& flip,
                 std::int64_t every,
                 const std::function<void(Reducer&, std::int64_t step,
                                          const std::optional<MismatchError>& error)>& expect) {
  const StepCase step = some_step(shape);
  run_mesh(shape, [&](const Mesh& mesh) {
    const bool flips = mesh.rank() == flipping_rank;
    Reducer reducer(
        mesh, options_of(every, std::make_shared<FlippingHop>(flips ? flip : FlippingHop::Flip())));
    register_all(reducer, step);
    for (std::int64_t number = 0; number < 4; ++number) {
      const auto error = caught<MismatchError>([&] {
        run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
        static_cast<void>(reducer.shard("first"));
      });
      expect(reducer, number, error);
      if (error) return;
    }
  });
}

TEST(VerifyEvery, NamesParameterBucketAndRankOfOneFlippedBit) {
  constexpr int kBucketCount = 5;
  for (int rank = 0; rank < kShape.size(); ++rank) {
    for (int bucket = 0; bucket < kBucketCount; ++bucket) {
      for (const std::int64_t bit : {0, 31, 5 * 64 - 1}) {  // of the first parameter in the row
        expect_flip(
            kShape, rank, {When::kAfterSum, 1, bucket, bit}, 2,
            [&](Reducer& reducer, std::int64_t step, const auto& error) {
              ASSERT_EQ(reducer.layout().buckets().size(), kBucketCount);
              if (step == 0) {
                EXPECT_EQ(error, std::nullopt);
                return;
              }
              const auto ranges = reducer.layout().ranges(bucket, rank % kShape.shard);
              const std::string name =
                  reducer.parameters()[static_cast<std::size_t>(ranges.front().parameter)].name;
              EXPECT_THAT(error, names({rank}, AllOf(HasSubstr("'" + name + "' in bucket " +
                                                               std::to_string(bucket)),
                                                     HasSubstr("in step 1"),
                                                     HasSubstr("on rank " + std::to_string(rank) +
                                                               " of 6 than on the rest"))));
            });
      }
    }
  }
}

TEST(VerifyEvery, NamesBothOfTwoReplicas) {
  expect_flip({2, 2}, 3, {When::kAfterSum, 0, 0, 5}, 1, [](Reducer&, std::int64_t, const auto& e) {
    EXPECT_THAT(e, names({1, 3}, HasSubstr("on rank 1 of 4, others on rank 3 of 4, as many on")));
  });
}

TEST(VerifyEvery, OnlyLooksAtEveryNthStep) {
  expect_flip(kShape, 2, {When::kAfterSum, 1, 0, 5}, 3,
              [](Reducer&, std::int64_t, const auto& error) { EXPECT_EQ(error, std::nullopt); });
}

// An error before the sum is the same on all replicas.
TEST(VerifyEvery, DoesNotSeeWhatTheSumMakesEqual) {
  expect_flip(kShape, 2, {When::kBeforeSum, 1, 0, 5}, 1,
              [](Reducer&, std::int64_t, const auto& error) { EXPECT_EQ(error, std::nullopt); });
}

TEST(VerifyEvery, ChangesNoBitAndSendsNoMessageMore) {
  for (const MeshShape shape : {kShape, MeshShape{1, 2}, MeshShape{2, 1}}) {
    const StepCase step = some_step(shape);
    run_mesh(shape, [&](const Mesh& mesh) {
      std::vector<std::int64_t> messages;
      std::vector<Values> results;
      for (const std::int64_t every : {0, 1}) {
        Reducer reducer(mesh, options_of(every));
        register_all(reducer, step);
        run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
        static_cast<void>(reducer.shard("first"));
        const std::int64_t before = reducer.stats().control_message_count;
        run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
        results.push_back(values_of(reducer.shard("last")));
        static_cast<void>(reducer.found_inf());
        messages.push_back(reducer.stats().control_message_count - before);
      }
      EXPECT_EQ(results[0], results[1]);
      EXPECT_EQ(messages[0], messages[1]);
    });
  }
}

TEST(VerifyEvery, DroppedAndDiscardedStepsAreNotCompared) {
  const StepCase step = some_step(kShape);
  run_reducers(kShape, step, options_of(1), [&](Reducer& reducer, const Mesh& mesh) {
    drop_step(reducer, step, mesh.rank());
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    reducer.discard();
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
    static_cast<void>(reducer.shard("first"));
  });
}

TEST(VerifyEvery, RefusesANegativeNumber) {
  run_mesh({2, 1}, [](const Mesh& mesh) {
    EXPECT_THAT(caught<UsageError>([&] { const Reducer reducer(mesh, options_of(-1)); }),
                says(HasSubstr("expected verify_every of at least 1, or 0 for no step, got -1")));
  });
}

}  // namespace
}  // namespace hsdp
