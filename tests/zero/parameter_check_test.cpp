// verify_every beside a ParameterGather: parameters that differ between ranks are found and named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"
#include "tests/zero/sliced_parameters.h"
#include "zero/parameter_gather.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::AllOf;
using testing::HasSubstr;
using zero::ParameterGather;

constexpr MeshShape kShape{2, 2};

struct Check {
  std::int64_t every = 1;
  ShardOver over = ShardOver::kShard;
};

StepCase some_step() {
  return integer_step(
      {{.name = "first", .shape = {100}}, {.name = "last", .shape = {300}, .dtype = Dtype::kBf16}},
      kShape.size(), 1, 3);
}

// What may go wrong with this rank's parameters, before a gather or after it; -1: nothing.
using Fault = std::function<void(SlicedParameters&, std::int64_t gather)>;

// Gathers and steps in turn, until one fails.
void expect_gathers(
    const Check& check, const Mesh& mesh, const Fault& before, const Fault& after,
    const std::function<void(std::int64_t gather, const std::optional<MismatchError>&)>& expect) {
  const StepCase step = some_step();
  Reducer reducer(mesh,
                  {.bucket_bytes = 512, .shard_over = check.over, .verify_every = check.every});
  SlicedParameters parameters(
      reducer, step.parameters, SlicedParameters::Masters::kOf16Bits,
      [](const ParameterSpec& spec) { return Values(element_count(spec.shape), 1.0F); });
  ParameterGather gather(reducer, parameters.gathered());
  for (std::int64_t number = 1; number <= 4; ++number) {
    if (before) before(parameters, number);
    gather.start_all({});
    if (after) {
      gather.wait_all();
      after(parameters, number);
    }
    const auto error = caught<MismatchError>([&] {
      run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
      run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
      static_cast<void>(reducer.shard("first"));
    });
    expect(number, error);
    if (error) return;
  }
}

void flip(TensorView array, std::int64_t bit) {
  auto* const byte = static_cast<unsigned char*>(array.data) + bit / 8;
  *byte = static_cast<unsigned char>(*byte ^ (1U << bit % 8));
}

TEST(ParameterCheck, NamesParameterAndRankOfOneFlippedBit) {
  for (const ShardOver over : {ShardOver::kShard, ShardOver::kMesh}) {
    for (int rank = 0; rank < kShape.size(); ++rank) {
      for (const std::size_t p : {0U, 1U}) {
        for (const std::int64_t bit :
             {std::int64_t{0}, std::int64_t{100 * (p == 0 ? 32 : 48) - 1}}) {
          run_mesh(kShape, [&](const Mesh& mesh) {
            const Fault fault = [&](SlicedParameters& parameters, std::int64_t gather) {
              if (mesh.rank() == rank && gather == 2) flip(parameters.array(p), bit);
            };
            expect_gathers({2, over}, mesh, {}, fault, [&](std::int64_t gather, const auto& error) {
              if (gather == 1) {
                EXPECT_EQ(error, std::nullopt);
                return;
              }
              EXPECT_THAT(
                  error, names({rank}, AllOf(HasSubstr("expected parameters after their gather '" +
                                                       std::string(p == 0 ? "first" : "last")),
                                             HasSubstr("on rank " + std::to_string(rank) + " of 4"),
                                             HasSubstr("look for a fault of memory"))));
            });
          });
        }
      }
    }
  }
}

// Replicas that update the same slice: one of them sends other bits to its shard group.
TEST(ParameterCheck, SeesSlicesThatDifferBetweenReplicas) {
  run_mesh(kShape, [&](const Mesh& mesh) {
    const Fault fault = [&](SlicedParameters& parameters, std::int64_t gather) {
      if (mesh.rank() == 3 && gather == 3) flip(parameters.own(1), 31);
    };
    expect_gathers({1}, mesh, fault, {}, [&](std::int64_t gather, const auto& error) {
      if (gather < 3) {
        EXPECT_EQ(error, std::nullopt);
      } else {
        EXPECT_THAT(error, names({2, 3}, HasSubstr("'last of digest")));
      }
    });
  });
}

// Nobody else has updated that slice.
TEST(ParameterCheck, DoesNotSeeWhatTheGatherMakesEqual) {
  run_mesh(kShape, [&](const Mesh& mesh) {
    const Fault fault = [&](SlicedParameters& parameters, std::int64_t gather) {
      if (mesh.rank() == 3 && gather == 2) flip(parameters.own(1), 31);
    };
    expect_gathers({1, ShardOver::kMesh}, mesh, fault, {},
                   [&](std::int64_t, const auto& error) { EXPECT_EQ(error, std::nullopt); });
  });
}

TEST(ParameterCheck, OnlyLooksAtEveryNthGather) {
  run_mesh(kShape, [&](const Mesh& mesh) {
    const Fault fault = [&](SlicedParameters& parameters, std::int64_t gather) {
      if (mesh.rank() == 1 && gather % 3 != 0) flip(parameters.array(0), 7);
    };
    expect_gathers({3}, mesh, {}, fault,
                   [&](std::int64_t, const auto& error) { EXPECT_EQ(error, std::nullopt); });
  });
}

TEST(ParameterCheck, SendsNoMessageMore) {
  run_mesh(kShape, [&](const Mesh& mesh) {
    const StepCase step = some_step();
    std::vector<std::int64_t> messages;
    for (const std::int64_t every : {0, 1}) {
      Reducer reducer(mesh, {.shard_over = ShardOver::kMesh, .verify_every = every});
      SlicedParameters parameters(
          reducer, step.parameters, SlicedParameters::Masters::kOf16Bits,
          [](const ParameterSpec& spec) { return Values(element_count(spec.shape), 1.0F); });
      ParameterGather gather(reducer, parameters.gathered());
      std::int64_t before = 0;
      for (int number = 0; number < 3; ++number) {
        before = reducer.stats().control_message_count;
        gather.start_all({});
        run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
        static_cast<void>(reducer.found_inf());
      }
      messages.push_back(reducer.stats().control_message_count - before);
    }
    EXPECT_EQ(messages[0], messages[1]);
  });
}

}  // namespace
}  // namespace hsdp
