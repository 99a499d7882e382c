// What LocoHop does beside its arithmetic: counts, refusals, changes of owner, memory.
#include "quant/loco_hop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "quant/loco_exchange.h"
#include "tests/comm/rank_threads.h"
#include "tests/support/hop_contract.h"
#include "tests/support/reducer_step.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::quant {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(LocoHop, KeepsWhatEveryHopKeeps) {
  const auto make = [](const LocoOptions& options) {
    return [options] { return std::make_shared<LocoHop>(options); };
  };
  for (const test::MeshShape shape : {test::MeshShape{2, 2}, test::MeshShape{3, 2}}) {
    test::check_hop_contract(make({.reset_T = 2}), shape);
    test::check_hop_contract(
        make({.group_size = 32, .error_dtype = Dtype::kF32, .exclude = {"norm"}}), shape);
  }
  test::check_hop_contract(make({.bits = 8, .gather = Code::kBf16}), {2, 2});
  test::check_hop_contract(make({.error_feedback = false}), {2, 2});
}

// Elements [from, from + count) of "layer.weight", which has twice as many, in one bucket.
HopPlan one_bucket(std::int64_t count, int replicas = 2, std::int64_t from = 0) {
  return {.parameters = {{"layer.weight", {2 * count}}},
          .ranges = {{{0, 0, count, from}}},
          .wires = {Dtype::kF32},
          .replicate_size = replicas};
}

// Everything that a step does before its end.
void reduce(LocoHop& hop, std::vector<float> values) {
  std::atomic<std::uint32_t> nonfinite = 0;
  Stream stream = Stream::inline_host();
  static_cast<void>(hop.means(0, 1.0F));
  hop.reduce({.data = {values.data(), std::ssize(values), Dtype::kF32, {}},
              .arithmetic = {.mean_divisor = 1.0F},
              .nonfinite = &nonfinite},
             stream)
      .wait();
}

// One group: a 7 and 63 times `rest`, the same on both replicas. Returns its errors after one step.
std::vector<QuantizationError> errors_with(float rest, std::int64_t every = 1) {
  std::vector<QuantizationError> errors;
  test::run_world({.size = 2}, [&](Communicator& world) {
    LocoHop hop({.error_every = every});
    const HopPlan plan = one_bucket(64);
    hop.prepare(plan);
    hop.bind(world, world.split(0, world.rank()));
    std::vector<float> values(64, rest);
    values[0] = 7.0F;
    reduce(hop, values);
    EXPECT_TRUE(hop.quantization_error().empty());
    EXPECT_THROW(static_cast<void>(hop.state()), UsageError);
    EXPECT_THROW(hop.scale_errors(0.5F), UsageError);
    hop.end_step({0, StepOutcome::kClean, ""});
    if (world.rank() == 0) errors = hop.quantization_error();
    hop.bind({}, {});
  });
  return errors;
}

TEST(LocoHop, SaysHowMuchItChanges) {
  std::vector<QuantizationError> errors = errors_with(1.25F);  // quantized to 7, and 1 for the rest
  ASSERT_EQ(errors.size(), 1U);
  EXPECT_EQ(errors[0].parameter, "layer.weight");
  EXPECT_NEAR(errors[0].scattered, std::sqrt(63 * 0.0625 / (49 + 63 * 1.5625)), 1e-6);
  EXPECT_EQ(errors[0].gathered, 0.0);  // 14 and 2 scale to 7 and 1 again
  EXPECT_TRUE(errors_with(1.25F, 0).empty());
  testing::internal::CaptureStderr();
  errors = errors_with(0.5F);
  EXPECT_NEAR(errors[0].scattered, std::sqrt(63 * 0.25 / (49 + 63 * 0.25)), 1e-6);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("'layer.weight': quantization changed its gradient by 0.49 of its norm"));
}

// A hop with errors of the first 128 elements, which its owner has released.
struct Used {
  explicit Used(Communicator& world) : gather(world.split(0, world.rank())) {
    hop.prepare(plan);
    hop.bind(world, gather);
    reduce(hop, std::vector<float>(128, 1.3F));
    hop.end_step({0, StepOutcome::kClean, ""});
    hop.bind({}, {});
  }
  HopPlan plan = one_bucket(128);
  Communicator gather;
  LocoHop hop;
};

TEST(LocoHop, RefusesAnotherPlaceThatItHasNoErrorsOf) {
  test::run_world({.size = 2}, [](Communicator& world) {
    Used used(world);
    // As another cut or another shard count would.
    const HopPlan other_part = one_bucket(128, 2, 128);
    used.hop.prepare(other_part);
    EXPECT_THAT([&] { used.hop.bind(world, used.gather); },
                ThrowsMessage<UsageError>(HasSubstr("the part of 'layer.weight'")));
    used.hop.bind({}, {});
    // For another number of replicas the message also says what to do.
    const HopPlan one_replica = one_bucket(128, 1, 128);
    used.hop.prepare(one_replica);
    Communicator alone = world.split(world.rank(), 0);
    EXPECT_THROW(used.hop.bind(alone, alone), UsageError);
    used.hop.bind({}, {});
    for (const HopState& one : used.hop.state()) {
      if (one.key != "replicas") continue;
      EXPECT_EQ(*static_cast<const std::int64_t*>(one.data.data), 2);
    }
    LocoHop fresh;
    fresh.load_state(used.hop.state());
    EXPECT_EQ(fresh.steps(), 1);
    EXPECT_EQ(fresh.state().size(), used.hop.state().size());
    fresh.prepare(used.plan);
    fresh.bind(world, used.gather);
    EXPECT_EQ(fresh.steps(), 1);
    fresh.bind({}, {});
  });
}

TEST(LocoHop, SaysInItsWordThatItsErrorsMove) {
  test::run_world({.size = 2}, [](Communicator& world) {
    Used used(world);
    EXPECT_EQ(used.hop.word(), "1 steps");
    used.hop.prepare(used.plan);
    used.hop.bind(world, used.gather);
    EXPECT_EQ(used.hop.word(), "1 steps moved");
    reduce(used.hop, std::vector<float>(128, 1.3F));
    EXPECT_EQ(used.hop.word(), "1 steps moved");  // unchanged throughout the step
    used.hop.end_step({0, StepOutcome::kDropped, ""});
    EXPECT_EQ(used.hop.word(), "1 steps");
    used.hop.scale_errors(0.5F);
    EXPECT_LE(used.hop.word().size(), StepParty::kMaxWordBytes);
    EXPECT_NE(used.hop.word(), "1 steps");
    used.hop.bind({}, {});
  });
}

TEST(LocoHop, TellsFactorsApartInItsWord) {
  test::run_world({.size = 2}, [](Communicator& world) {
    const auto word = [&](float factor) {
      Used used(world);
      used.hop.scale_errors(factor);
      return used.hop.word();
    };
    EXPECT_NE(word(0.0F), "1 steps");
    EXPECT_NE(word(0.2F), word(0.59F));
    EXPECT_NE(word(0.0625F), word(0.953125F));
  });
}

// The next Reducer's first buckets are sent while one rank is still in its backward.
TEST(LocoHop, GoesToAnotherReducer) {
  const auto second_step = [](bool changes) {
    std::vector<test::Values> means(2);
    test::run_mesh({2, 1}, [&](const Mesh& mesh) {
      const auto hop = std::make_shared<LocoHop>();
      std::unique_ptr<Reducer> reducer;
      for (int step = 0; step < 2; ++step) {
        if (step == 0 || changes) {
          reducer.reset();
          reducer = std::make_unique<Reducer>(
              mesh, ReducerOptions{.bucket_bytes = 4096, .replica_hop = hop});
          reducer->register_parameter({.name = "a", .shape = {1024}});
          reducer->register_parameter({.name = "b", .shape = {1024}});
        }
        const test::StoredGradient gradient(
            test::random_values(1024, Dtype::kF32, static_cast<std::uint64_t>(mesh.rank())), {1024},
            Dtype::kF32);
        reducer->begin_microbatch({.last = true});
        for (const char* const name : {"a", "b"}) {
          if (mesh.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
          reducer->gradient_ready(name, gradient.view());
        }
        reducer->end_microbatch();
        means[static_cast<std::size_t>(mesh.rank())] = test::values_of(reducer->shard("a"));
      }
      EXPECT_EQ(hop->steps(), 2);
    });
    return means;
  };
  EXPECT_EQ(second_step(true), second_step(false));
}

// Groups lie at multiples of their size in each parameter, whichever rank owns it and however it
// travels.
TEST(LocoHop, GivesSlicesAndWholeParametersTheSameBits) {
  const std::vector<ParameterSpec> parameters{{.name = "a", .shape = {40, 31}},
                                              {.name = "b", .shape = {1000}},
                                              {.name = "c", .shape = {257, 3}},
                                              {.name = "d", .shape = {64}},
                                              {.name = "scalar", .shape = {}}};
  std::vector<test::StepCase> steps;
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    steps.push_back(test::random_step(parameters, 6, {Sync::kAll}, seed));
  }
  const auto means_of = [&](Layout layout, std::int64_t bucket_bytes) {
    std::vector<test::Values> means;
    test::run_mesh({2, 3}, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.layout = layout,
                             .bucket_bytes = bucket_bytes,
                             .replica_hop = std::make_shared<LocoHop>()});
      test::register_all(reducer, steps[0]);
      for (const test::StepCase& step : steps) test::run_step(reducer, step, mesh.rank());
      const std::vector<test::Values> all = test::gathered(reducer, steps[0]);
      if (mesh.rank() == 0) means = all;
    });
    return means;
  };
  const std::vector<test::Values> want = means_of(Layout::kFlat, 1 << 20);
  for (const std::int64_t bucket_bytes : {512, 1000, 5000, 1 << 20}) {
    EXPECT_EQ(means_of(Layout::kWhole, bucket_bytes), want) << bucket_bytes;
  }
}

// The factor is known once all words are in, and this hop divides before it sends.
TEST(LocoHop, DividesByTokensThatAllRanksCounted) {
  std::vector<test::StepCase> steps;
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    steps.push_back(test::random_step(
        {{.name = "a", .shape = {1024}}, {.name = "b", .shape = {640}, .group = "late"}}, 4,
        {Sync::kShard, Sync::kAll}, seed));
  }
  const auto means_of = [&](bool counts) {
    std::vector<test::Values> means(4);
    test::run_mesh({2, 2}, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.replica_hop = std::make_shared<LocoHop>()});
      test::register_all(reducer, steps[0]);
      for (const test::StepCase& step : steps) {
        for (int m = 0; m < 2; ++m) {
          if (counts) reducer.divide_by_tokens(5 + 2 * mesh.rank() + m);
          if (!counts) reducer.set_gradient_divide_factor(2 * (5 + 7 + 9 + 11) + 4);
          if (counts && m == 0) {
            reducer.set_requires_all_reduce(false, "late");
            EXPECT_THROW(reducer.begin_microbatch(), UsageError);
            reducer.set_requires_all_reduce(true, "late");
          }
          test::run_microbatch(reducer, step, m, mesh.rank(), {.last = m == 1});
        }
        const test::Values mean = test::values_of(reducer.shard("a"));
        test::Values& all = means[static_cast<std::size_t>(mesh.rank())];
        all.insert(all.end(), mean.begin(), mean.end());
      }
    });
    return means;
  };
  EXPECT_EQ(means_of(true), means_of(false));
}

// A step that counts nothing may reduce its groups at different times, whatever the step before
// did.
TEST(LocoHop, ForgetsTheTokensOfAnEarlierStep) {
  const test::StepCase step = test::random_step(
      {{.name = "a", .shape = {1024}}, {.name = "b", .shape = {640}, .group = "late"}}, 4,
      {Sync::kShard, Sync::kAll}, 1);
  for (const bool drops : {false, true}) {
    test::run_mesh({2, 2}, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.replica_hop = std::make_shared<LocoHop>()});
      test::register_all(reducer, step);
      reducer.divide_by_tokens(5);
      test::run_microbatch(reducer, step, 0, mesh.rank(), {.last = !drops});
      if (drops) reducer.discard();
      reducer.set_requires_all_reduce(false, "late");
      EXPECT_NO_THROW(test::run_microbatch(reducer, step, 0, mesh.rank(), {}));
      reducer.set_requires_all_reduce(true, "late");
      test::run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
      EXPECT_NO_THROW(static_cast<void>(reducer.shard("a")));
    });
  }
}

TEST(LocoHop, LetsWhatItExcludesBeFrozen) {
  test::run_world({.size = 2}, [](Communicator& world) {
    const HopPlan plan{.parameters = {{"norm", {32}}, {"layer.weight", {128}}},
                       .ranges = {{{0, 0, 32, 0}, {1, 32, 64, 0}}},
                       .replicate_size = 2};
    LocoHop hop({.exclude = {"norm"}});
    hop.prepare(plan);
    hop.bind(world, world.split(0, world.rank()));
    const HopPlan frozen = one_bucket(64);
    EXPECT_NO_THROW(hop.prepare(frozen));
    hop.bind({}, {});
  });
}

TEST(LocoHop, CountsItsMemory) {
  const HopPlan plan = one_bucket(8192);
  const auto bytes_of = [&plan](const LocoOptions& options) {
    LocoHop hop(options);
    hop.prepare(plan);
    return plan.memory.of(MemoryKind::kReplicaHop).live;
  };
  // 1.0625 bytes an element and for each that it owns, twice.
  EXPECT_EQ(bytes_of({}), 2 * (8192 + 4096) * 17 / 16);
  EXPECT_EQ(bytes_of({.error_dtype = Dtype::kF32}), 2 * (8192 + 4096) * 4);
  EXPECT_EQ(bytes_of({.gather = Code::kBf16}), 2 * 8192 * 17 / 16);
  EXPECT_EQ(bytes_of({.error_feedback = false}), 0);
}

TEST(LocoHop, RefusesAPatternThatMatchesNothing) {
  const HopPlan plan = one_bucket(64);
  LocoHop hop({.exclude = {"*norm*"}});
  EXPECT_THAT([&] { hop.prepare(plan); },
              ThrowsMessage<UsageError>(
                  AllOf(HasSubstr("'*norm*', which matches none"), HasSubstr("layer.weight"))));
  hop.bind({}, {});  // as when its owner releases it
}

TEST(Windows, AreCutAtGroupsAndAboutEqual) {
  const std::vector<ParameterRange> ranges{{0, 0, 100, 0}, {1, 100, 5000, 37}, {2, 5200, 64, 0}};
  for (const std::int64_t size : {64, 500, 1 << 20}) {
    const auto windows = cut_into_windows(ranges, 64, size);
    std::int64_t element = 0;
    std::int64_t total = 0;
    for (const auto& window : windows) {
      std::int64_t count = 0;
      for (const ParameterRange& run : window) {
        EXPECT_GE(run.offset, element);
        element = run.offset + run.count;
        count += run.count;
        const ParameterRange& whole = ranges[static_cast<std::size_t>(run.parameter)];
        EXPECT_EQ(run.offset - whole.offset, run.flat_offset - whole.flat_offset);
        EXPECT_TRUE(run.flat_offset == whole.flat_offset || run.flat_offset % 64 == 0);
      }
      EXPECT_LT(count, size + 64);
      total += count;
    }
    EXPECT_EQ(total, 5164);
    EXPECT_EQ(windows.size() == 1, size == 1 << 20);
  }
}

TEST(LocoOptions, NameWhatIsWrong) {
  EXPECT_NO_THROW(LocoHop());
  const std::pair<LocoOptions, const char*> rows[] = {
      {{.bits = 5}, "bits: expected 4 or 8, got 5"},
      {{.group_size = 100}, "multiple of 32"},
      {{.err_beta = 1.0}, "err_beta"},
      {{.error_dtype = Dtype::kF32, .stochastic_error = true}, "stochastic"},
  };
  for (const auto& row : rows) {
    EXPECT_THAT([&] { const LocoHop hop(row.first); },
                ThrowsMessage<UsageError>(HasSubstr(row.second)));
  }
}

}  // namespace
}  // namespace hsdp::quant
