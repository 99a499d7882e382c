// verify_every beside a ParameterGather: parameters that differ between ranks are found and named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
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
using testing::ThrowsMessage;
using zero::ParameterGather;

constexpr MeshShape kShape{3, 2};

Values ones(const ParameterSpec& spec) {
  return Values(static_cast<std::size_t>(element_count(spec.shape)), 1.0F);
}

struct Check {
  std::int64_t every = 1;
  ShardOver over = ShardOver::kShard;
};

StepCase some_step() {
  return integer_step(
      {{.name = "first", .shape = {100}}, {.name = "last", .shape = {300}, .dtype = Dtype::kBf16}},
      kShape.size(), 1, 3);
}

// Gathers and steps in turn, until one fails. `fault` changes this rank's slices before a gather.
using Fault = std::function<void(SlicedParameters&, std::int64_t gather)>;
void expect_gathers(
    const Check& check, const Mesh& mesh, const Fault& fault,
    const std::function<void(std::int64_t gather, const std::optional<MismatchError>&)>& expect) {
  const StepCase step = some_step();
  Reducer reducer(mesh,
                  {.bucket_bytes = 512, .shard_over = check.over, .verify_every = check.every});
  SlicedParameters parameters(reducer, step.parameters, SlicedParameters::Masters::kOf16Bits, ones);
  ParameterGather gather(reducer, parameters.gathered());
  for (std::int64_t number = 1; number <= 4; ++number) {
    fault(parameters, number);
    gather.start_all({});
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

// Replicas update the same slices, but one of them sends other bits to its shard group.
TEST(ParameterCheck, NamesTheParameterAndTheReplicaOfOneFlippedBit) {
  for (int rank = 0; rank < kShape.size(); ++rank) {
    for (const std::size_t p : {0U, 1U}) {
      for (const bool is_last : {false, true}) {  // of the slice; the sign survives rounding
        run_mesh(kShape, [&](const Mesh& mesh) {
          const Fault fault = [&](SlicedParameters& parameters, std::int64_t gather) {
            if (mesh.rank() != rank || gather != 2) return;
            flip(parameters.own(p), 32 * (is_last ? parameters.own(p).count : 1) - 1);
          };
          expect_gathers({2}, mesh, fault, [&](std::int64_t gather, const auto& error) {
            if (gather == 1) {
              EXPECT_EQ(error, std::nullopt);
              return;
            }
            const int first = rank / kShape.shard * kShape.shard;
            const std::string name = p == 0 ? "first" : "last";
            EXPECT_THAT(error,
                        names({first, first + 1},
                              AllOf(HasSubstr("expected parameters after their gather '" + name),
                                    HasSubstr("on rank " + std::to_string(first) + " of 6"),
                                    HasSubstr("look for a fault of memory"))));
          });
        });
      }
    }
  }
}

// No other rank has updated that slice, and the gather gives all ranks the same bits.
TEST(ParameterCheck, DoesNotSeeWhatTheGatherMakesEqual) {
  run_mesh(kShape, [&](const Mesh& mesh) {
    const Fault fault = [&](SlicedParameters& parameters, std::int64_t gather) {
      if (mesh.rank() == 3 && gather == 2) flip(parameters.own(1), 31);
    };
    expect_gathers({1, ShardOver::kMesh}, mesh, fault,
                   [&](std::int64_t, const auto& error) { EXPECT_EQ(error, std::nullopt); });
  });
}

TEST(ParameterCheck, OnlyLooksAtEveryNthGather) {
  run_mesh(kShape, [&](const Mesh& mesh) {
    const Fault fault = [&](SlicedParameters& parameters, std::int64_t gather) {
      if (mesh.rank() == 1 && gather % 3 != 2) flip(parameters.own(0), 7);  // and back
    };
    expect_gathers({3}, mesh, fault, [&](std::int64_t gather, const auto& error) {
      EXPECT_EQ(error.has_value(), false) << gather;
    });
  });
}

// One rank posts no word in the step that it drops. Afterwards all ranks write other parameters.
TEST(ParameterCheck, ADroppedStepIsNoDifference) {
  run_mesh(kShape, [&](const Mesh& mesh) {
    const StepCase step = some_step();
    Reducer reducer(mesh, {.verify_every = 1});
    SlicedParameters parameters(reducer, step.parameters, SlicedParameters::Masters::kNone, ones);
    ParameterGather gather(reducer, parameters.gathered());
    for (int number = 0; number < 3; ++number) {
      gather.start_all({});
      drop_step(reducer, step, mesh.rank());
      gather.wait_all();
      flip(parameters.array(0), 7);
      run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
      static_cast<void>(reducer.shard("first"));
    }
  });
}

// If it could not be made on one rank, all ranks make it again.
TEST(ParameterCheck, IsMadeOnAllRanksOrNone) {
  run_mesh(kShape, [&](const Mesh& mesh) {
    const StepCase step = some_step();
    Reducer reducer(mesh, {.verify_every = 1});
    SlicedParameters parameters(reducer, step.parameters, SlicedParameters::Masters::kNone, ones);
    std::vector<zero::GatheredParameter> bad = parameters.gathered();
    if (mesh.rank() == 1) bad.front().array.count -= 1;
    EXPECT_THROW(ParameterGather(reducer, bad), Error);
    ParameterGather gather(reducer, parameters.gathered());
    gather.start_all({});
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
    static_cast<void>(reducer.shard("first"));
    Step begun(reducer);
    const auto make = [&] { const ParameterGather other(reducer, parameters.gathered()); };
    EXPECT_THAT(make, ThrowsMessage<UsageError>(HasSubstr("construction between steps")));
  });
}

// So many parameters that the one that differs is not among the first texts.
TEST(ParameterCheck, NamesOneOfManyParameters) {
  constexpr int kMany = 900;
  run_mesh({2, 1}, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.verify_every = 1});
    std::vector<ParameterSpec> specs;
    for (int p = 0; p < kMany; ++p) {
      specs.push_back(
          {.name = "model.layers." + std::to_string(p) + ".self_attention.q_proj.weight",
           .shape = {3}});
    }
    SlicedParameters parameters(reducer, specs, SlicedParameters::Masters::kNone, ones);
    ParameterGather gather(reducer, parameters.gathered());
    if (mesh.rank() == 1) flip(parameters.own(kMany - 2), 0);
    gather.start_all({});
    const std::vector<float> gradient(3, 1.0F);
    const auto error = caught<MismatchError>([&] {
      Microbatch open(reducer, {.last = true});
      for (int p = 0; p < kMany; ++p) {
        reducer.gradient_ready(p, {gradient.data(), Dtype::kF32, {}, {3}, {}});
      }
      open.end();
      static_cast<void>(reducer.shard(specs.front().name));
    });
    EXPECT_THAT(error, names({1}, HasSubstr("model.layers.898.self_attention")));
  });
}

TEST(ParameterCheck, SendsNoMessageMore) {
  run_mesh(kShape, [&](const Mesh& mesh) {
    const StepCase step = some_step();
    std::vector<std::int64_t> messages;
    for (const std::int64_t every : {0, 1}) {
      Reducer reducer(mesh, {.shard_over = ShardOver::kMesh, .verify_every = every});
      SlicedParameters parameters(reducer, step.parameters, SlicedParameters::Masters::kOf16Bits,
                                  ones);
      ParameterGather gather(reducer, parameters.gathered());
      std::int64_t least = 1000;  // a step later for some
      for (int number = 0; number < 20; ++number) {
        const std::int64_t before = reducer.stats().control_message_count;
        gather.start_all({});
        run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
        static_cast<void>(reducer.found_inf());
        least = std::min(least, reducer.stats().control_message_count - before);
      }
      messages.push_back(least);
    }
    EXPECT_EQ(messages[0], messages[1]);
  });
}

}  // namespace
}  // namespace hsdp
