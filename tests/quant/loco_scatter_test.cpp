// LocoHop with results sharded over the mesh: each replica keeps its part of the sums.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "quant/loco_exchange.h"
#include "quant/loco_hop.h"
#include "tests/comm/rank_threads.h"
#include "tests/support/hop_contract.h"
#include "tests/support/loco_reference.h"
#include "tests/support/reducer_step.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::quant {
namespace {

using test::LocoReference;
using test::MeshShape;
using test::Values;

TEST(LocoScatter, KeepsWhatEveryHopKeeps) {
  const auto make = [](const LocoOptions& options) {
    return [options] { return std::make_shared<LocoHop>(options); };
  };
  for (const MeshShape shape : {MeshShape{2, 2}, MeshShape{3, 2}}) {
    test::check_hop_contract(make({.reset_T = 2}), shape, ShardOver::kMesh);
    test::check_hop_contract(
        make({.group_size = 32, .error_dtype = Dtype::kF32, .exclude = {"norm"}}), shape,
        ShardOver::kMesh);
  }
}

// Adds microbatch by microbatch and rank by rank, as the carry is formed. Returns [replica].
std::vector<Values> shard_sums(const test::Gradients& gradients, MeshShape shape) {
  std::vector<Values> carries(static_cast<std::size_t>(shape.replicate));
  for (const auto& microbatch : gradients) {
    for (std::size_t q = 0; q < carries.size(); ++q) {
      Values row;
      for (std::size_t s = 0; s < static_cast<std::size_t>(shape.shard); ++s) {
        const Values& one = *microbatch[q * static_cast<std::size_t>(shape.shard) + s];
        if (s == 0) row.assign(one.size(), 0.0F);
        for (std::size_t i = 0; i < row.size(); ++i) row[i] = s == 0 ? one[i] : row[i] + one[i];
      }
      Values& carry = carries[q];
      if (carry.empty()) carry.assign(row.size(), -0.0F);
      for (std::size_t i = 0; i < row.size(); ++i) carry[i] = carry[i] + row[i];
    }
  }
  return carries;
}

// Where slices and buckets cut a parameter.
std::vector<std::int64_t> cuts_of(const BucketLayout& layout, int parameter, std::int64_t count) {
  std::set<std::int64_t> cuts{0, count};
  for (int b = 0; b < static_cast<int>(std::ssize(layout.buckets())); ++b) {
    for (int r = 0; r < layout.shard_size(); ++r) {
      for (const ParameterRange& range : layout.ranges(b, r)) {
        if (range.parameter == parameter && range.count > 0) cuts.insert(range.flat_offset);
      }
    }
  }
  return {cuts.begin(), cuts.end()};
}

const std::vector<ParameterSpec> kParameters{{.name = "norm", .shape = {37}},
                                             {.name = "large", .shape = {70, 60}},
                                             {.name = "empty", .shape = {0}},
                                             {.name = "rows", .shape = {11, 13}},
                                             {.name = "scalar", .shape = {}}};
constexpr std::size_t kSteps = 5;
constexpr std::size_t kOverflows = 2;
constexpr std::size_t kDrops = 3;

std::vector<test::StepCase> some_steps(MeshShape shape) {
  std::vector<test::StepCase> steps;
  for (std::size_t s = 0; s < kSteps; ++s) {
    steps.push_back(test::random_step(kParameters, shape.size(), {Sync::kShard, Sync::kAll}, s));
  }
  (*steps[kOverflows].gradients[1][1].back())[17] = std::numeric_limits<float>::infinity();
  return steps;
}

// What the ranks end each step with, [step][rank], and how the parameters are cut.
struct Outcome {
  std::vector<std::vector<test::RankResult>> results;
  std::vector<LocoReference::Parameter> parameters;
};

// One rank drops the step after the others have reduced.
void drop(Reducer& reducer, const test::StepCase& step, int rank) {
  reducer.begin_microbatch({.sync = Sync::kAll});
  const std::vector<test::StoredGradient> gradients = test::deliver(reducer, step, 0, rank);
  if (rank == 0) return reducer.abandon_step("on purpose");
  reducer.end_microbatch();
  EXPECT_THROW(reducer.finish(), StepAbortedError);
}

Outcome run_steps(const std::vector<test::StepCase>& steps, MeshShape shape,
                  const LocoOptions& loco, ReducerOptions options) {
  Outcome outcome;
  outcome.results.assign(kSteps,
                         std::vector<test::RankResult>(static_cast<std::size_t>(shape.size())));
  test::run_mesh(shape, [&](const Mesh& mesh) {
    ReducerOptions own = options;
    const auto hop = std::make_shared<LocoHop>(loco);
    own.replica_hop = hop;
    Reducer reducer(mesh, own);
    test::register_all(reducer, steps[0]);
    reducer.prepare();
    if (mesh.rank() == 0) {
      for (std::size_t p = 0; p < kParameters.size(); ++p) {
        const int number = static_cast<int>(p);
        const std::int64_t count = element_count(kParameters[p].shape);
        outcome.parameters.push_back(
            {kParameters[p].name, cuts_of(reducer.layout(), number, count), number});
      }
    }
    for (std::size_t s = 0; s < kSteps; ++s) {
      if (s == kDrops) {
        drop(reducer, steps[s], mesh.rank());
        continue;
      }
      test::run_schedule(reducer, steps[s], mesh.rank());
      EXPECT_EQ(reducer.found_inf(), s == kOverflows);
      outcome.results[s][static_cast<std::size_t>(mesh.rank())] =
          test::read_result(reducer, steps[s]);
    }
    EXPECT_EQ(hop->steps(), static_cast<std::int64_t>(kSteps) - 2);
  });
  return outcome;
}

void expect_the_reference(MeshShape shape, const LocoOptions& loco, ReducerOptions options) {
  options.shard_over = ShardOver::kMesh;
  const std::vector<test::StepCase> steps = some_steps(shape);
  const Outcome outcome = run_steps(steps, shape, loco, options);
  LocoReference reference(loco, shape.replicate, outcome.parameters);
  reference.set_gathers(false);
  options.replica_dtype = loco.plain_dtype;
  for (std::size_t s = 0; s < kSteps; ++s) {
    std::vector<std::vector<Values>> sums(static_cast<std::size_t>(shape.replicate));
    for (const test::Gradients& gradients : steps[s].gradients) {
      const std::vector<Values> carries = shard_sums(gradients, shape);
      for (std::size_t q = 0; q < sums.size(); ++q) sums[q].push_back(carries[q]);
    }
    std::vector<Values> want = reference.reduce(sums, static_cast<float>(shape.size()));
    const std::vector<Values> plain = test::reference_results(steps[s], options, shape);
    for (std::size_t p = 0; s != kDrops && p < kParameters.size(); ++p) {
      if (reference.is_plain(p)) want[p] = plain[p];
      const Values got = test::joined(outcome.results[s], shape.shard, 0, p,
                                      element_count(kParameters[p].shape), ShardOver::kMesh);
      test::expect_same_bits(got, want[p],
                             to_string(shape) + ", " + describe(loco) + ", " +
                                 std::string(name(options.layout)) + ", step " + std::to_string(s) +
                                 ", " + kParameters[p].name);
    }
    reference.end_step(s != kOverflows && s != kDrops);
  }
}

class LocoScatterOn : public testing::TestWithParam<MeshShape> {};

TEST_P(LocoScatterOn, EqualsTheReference) {
  const std::array<LocoOptions, 5> options{
      LocoOptions{}, LocoOptions{.bits = 8, .group_size = 32, .error_dtype = Dtype::kF32},
      LocoOptions{.exclude = {"norm"},
                  .plain_dtype = Dtype::kF16,
                  .warmup_steps = 1,
                  .stochastic_error = true},
      LocoOptions{.reset_T = 2, .exclude = {"rows"}, .plain_dtype = Dtype::kBf16},
      LocoOptions{.scale_dtype = Dtype::kF32, .error_feedback = false}};
  for (const LocoOptions& loco : options) {
    for (const Layout layout : {Layout::kFlat, Layout::kDim0, Layout::kWhole}) {
      expect_the_reference(GetParam(), loco, {.layout = layout, .bucket_bytes = 4 << 10});
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, LocoScatterOn,
                         testing::Values(MeshShape{2, 2}, MeshShape{3, 1}, MeshShape{2, 3}),
                         [](const auto& row) { return to_string(row.param); });

TEST(LocoScatter, SendsF64AsItIs) {
  test::run_mesh({2, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh,
                    {.replica_hop = std::make_shared<LocoHop>(), .shard_over = ShardOver::kMesh});
    reducer.register_parameter({.name = "w", .shape = {256}});
    reducer.register_parameter({.name = "d", .shape = {10}, .dtype = Dtype::kF64});
    const std::vector<float> w(256, 1.0F);
    const std::vector<double> d(10, 1.0 + std::ldexp(1.0, -40) * mesh.rank());
    reducer.begin_microbatch({.last = true});
    reducer.gradient_ready("w", {w.data(), Dtype::kF32, {}, {256}, {}});
    reducer.gradient_ready("d", {d.data(), Dtype::kF64, {}, {10}, {}});
    reducer.end_microbatch();
    const TensorView part = reducer.shard("d");
    for (std::int64_t i = 0; i < part.count; ++i) {
      EXPECT_EQ(static_cast<const double*>(part.data)[i], 1.0 + std::ldexp(1.5, -40));
    }
  });
}

// 2^14 elements on each shard rank, in whole groups: 17 bytes for 32 elements.
TEST(LocoScatter, SendsTheFirstHalfAlone) {
  constexpr std::int64_t kElements = 1 << 14;
  for (const ShardOver shard_over : {ShardOver::kShard, ShardOver::kMesh}) {
    test::run_mesh({2, 2}, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.replica_hop = std::make_shared<LocoHop>(), .shard_over = shard_over});
      reducer.register_parameter({.name = "w", .shape = {2 * kElements}});
      const std::vector<float> gradient(2 * kElements, 7.0F);
      reducer.begin_microbatch({.last = true});
      reducer.gradient_ready("w", {gradient.data(), Dtype::kF32, {}, {2 * kElements}, {}});
      reducer.end_microbatch();
      EXPECT_EQ(static_cast<const float*>(reducer.shard("w").data)[0], 7.0F);
      const std::int64_t half = kElements * 17 / 32;
      const bool gathers = shard_over == ShardOver::kShard;
      EXPECT_EQ(reducer.stats().replica_hop_bytes, gathers ? 2 * half : half);
    });
  }
}

// `count` elements of "w" in one bucket, half of them for each of two replicas.
HopPlan two_parts(std::int64_t count, bool scatters = true, Dtype wire = Dtype::kF32) {
  HopPlan plan{.parameters = {{"w", {count}}},
               .ranges = {{{0, 0, count / 2, 0}, {0, count / 2, count - count / 2, count / 2}}},
               .data = {{{nullptr, count, Dtype::kF32, {}}}},
               .wires = {wire},
               .replicate_size = 2};
  if (scatters) plan.cuts = {RowCut({0, count / 2, count})};
  return plan;
}

// One clean step.
Values step(LocoHop& hop, Values values, bool scatters, int replica) {
  std::atomic<std::uint32_t> nonfinite = 0;
  Stream stream = Stream::inline_host();
  const std::int64_t count = std::ssize(values);
  const std::int64_t begin = replica * (count / 2);
  Values part(static_cast<std::size_t>(replica == 0 ? count / 2 : count - count / 2));
  HopBucket bucket{.data = {values.data(), count, Dtype::kF32, {}},
                   .arithmetic = {.mean_divisor = 1.0F},
                   .nonfinite = &nonfinite};
  if (scatters) bucket.part = {part.data(), std::ssize(part), Dtype::kF32, {}};
  static_cast<void>(hop.means(0, 1.0F));
  hop.reduce(bucket, stream).wait();
  hop.end_step({0, StepOutcome::kClean, ""});
  if (!scatters) std::copy_n(values.begin() + begin, part.size(), part.begin());
  return part;
}

TEST(LocoScatter, CountsItsMemory) {
  struct Bytes {
    std::int64_t hop = 0;
    std::int64_t staging = 0;
  };
  const auto bytes_of = [](const LocoOptions& options, bool scatters, Dtype wire) {
    Bytes first;
    test::run_world({.size = 2}, [&](Communicator& world) {
      const HopPlan plan = two_parts(8192, scatters, wire);
      LocoHop hop(options);
      hop.prepare(plan);
      hop.bind(world, world.split(0, world.rank()));
      const Bytes bytes{plan.memory.of(MemoryKind::kReplicaHop).live,
                        plan.memory.of(MemoryKind::kStaging).live};
      if (world.rank() == 0) first = bytes;
      hop.bind({}, {});
      const bool rounds = scatters && options.warmup_steps > 0;
      EXPECT_EQ(plan.memory.of(MemoryKind::kReplicaHop).live, bytes.hop - (rounds ? 2 * 8192 : 0));
    });
    return first;
  };
  constexpr std::int64_t kErrors = 2 * 8192 * 17 / 16;
  constexpr std::int64_t kMessage = 8192 * 17 / 32;
  const Bytes parts = bytes_of({}, true, Dtype::kBf16);
  EXPECT_EQ(parts.hop, kErrors);
  EXPECT_EQ(parts.staging, 2 * kMessage);
  const Bytes whole = bytes_of({}, false, Dtype::kBf16);
  EXPECT_EQ(whole.hop, kErrors + kErrors / 2);
  EXPECT_EQ(whole.staging, 3 * kMessage);
  // The rows of the plain wire.
  EXPECT_EQ(bytes_of({.warmup_steps = 1}, true, Dtype::kBf16).hop, kErrors + 2 * 8192);
}

TEST(LocoScatter, HasFiguresOfTheFirstHalf) {
  test::run_world({.size = 2}, [](Communicator& world) {
    LocoHop hop({.error_every = 1});
    const HopPlan plan = two_parts(128);
    hop.prepare(plan);
    EXPECT_FALSE(hop.needs_gather_group());
    hop.bind(world, {});
    Values values(128, 1.25F);  // quantized to 7, and 1 for the rest
    values[0] = values[64] = 7.0F;
    static_cast<void>(step(hop, values, true, world.rank()));
    const std::vector<QuantizationError> errors = hop.quantization_error();
    ASSERT_EQ(errors.size(), 1U);
    EXPECT_NEAR(errors[0].scattered, std::sqrt(63 * 0.0625 / (49 + 63 * 1.5625)), 1e-6);
    EXPECT_EQ(errors[0].gathered, 0.0);
    hop.bind({}, {});
  });
}

bool is_gathered(const std::string& key) { return key.find("/gather/") != std::string::npos; }

// All errors of a state, by key.
std::map<std::string, std::vector<std::byte>> errors_in(const std::vector<HopState>& state) {
  std::map<std::string, std::vector<std::byte>> errors;
  for (const HopState& one : state) {
    if (one.key.find('/') == std::string::npos) continue;
    const auto* const begin = static_cast<const std::byte*>(one.data.data);
    errors[one.key].assign(begin, begin + one.data.size_in_bytes());
  }
  return errors;
}

TEST(LocoScatter, LoadsErrorsOfBothHalvesAndIsLoaded) {
  test::run_world({.size = 2}, [](Communicator& world) {
    Communicator gather = world.split(0, world.rank());
    const HopPlan parts_plan = two_parts(256);
    const HopPlan whole_plan = two_parts(256, false);
    Values values = test::random_values(256, Dtype::kF32, 1U + static_cast<unsigned>(world.rank()));
    LocoHop whole;
    whole.prepare(whole_plan);
    whole.bind(world, gather);
    static_cast<void>(step(whole, values, false, world.rank()));
    auto saved = errors_in(whole.state());
    EXPECT_EQ(std::erase_if(saved, [](const auto& one) { return is_gathered(one.first); }), 2U);

    LocoHop parts;
    parts.prepare(parts_plan);
    parts.bind(world, {});
    parts.load_state(whole.state());
    EXPECT_EQ(parts.steps(), 1);
    EXPECT_EQ(errors_in(parts.state()), saved);

    LocoHop again;
    again.prepare(whole_plan);
    again.bind(world, gather);
    EXPECT_THAT(
        [&] { again.load_state(parts.state()); },
        testing::ThrowsMessage<UsageError>(testing::AllOf(
            testing::HasSubstr("of 'w' in the gathered half"), testing::HasSubstr("shard_over"))));
    EXPECT_EQ(again.steps(), 0);
    again.load_state(parts.state(), false);
    auto loaded = errors_in(again.state());
    for (const auto& [key, bytes] : loaded) {
      if (!is_gathered(key)) continue;
      EXPECT_EQ(bytes, std::vector<std::byte>(bytes.size())) << key;
    }
    std::erase_if(loaded, [](const auto& one) { return is_gathered(one.first); });
    EXPECT_EQ(loaded, saved);
    for (LocoHop* const hop : {&whole, &parts, &again}) hop->bind({}, {});
  });
}

TEST(Windows, HaveAboutEquallyMuchOfEachPart) {
  const std::vector<ParameterRange> ranges{
      {0, 0, 2000, 0}, {1, 2000, 1000, 64}, {1, 3000, 1000, 1064}, {2, 4005, 3000, 0}};
  const RowCut parts({0, 3000, 4000, 4000, 7005});
  for (const std::int64_t size : {256, 1000, 1 << 20}) {
    const auto windows = cut_into_windows(ranges, 64, size, parts);
    std::vector<std::int64_t> done{0, 3000, 4000, 4005};
    for (const auto& window : windows) {
      std::int64_t count = 0;
      int last = 0;
      for (const ParameterRange& run : window) {
        int part = 0;
        while (run.offset >= parts.begin(part + 1)) ++part;
        EXPECT_GE(part, last);
        last = part;
        EXPECT_EQ(run.offset, done[static_cast<std::size_t>(part)]);
        done[static_cast<std::size_t>(part)] += run.count;
        EXPECT_LE(done[static_cast<std::size_t>(part)], parts.begin(part + 1));
        EXPECT_TRUE(run.flat_offset % 64 == 0 || run.flat_offset == 1064);
        count += run.count;
      }
      EXPECT_LT(count, size + 4 * 64);
    }
    EXPECT_EQ(done, (std::vector<std::int64_t>{3000, 4000, 4000, 7005}));
    EXPECT_EQ(windows.size() == 1, size == 1 << 20);
    std::set<std::int64_t> begins;
    for (const ParameterRange& run : windows.front()) begins.insert(run.offset);
    for (const std::int64_t begin : {0, 3000, 4005}) EXPECT_TRUE(begins.contains(begin)) << size;
  }
}

}  // namespace
}  // namespace hsdp::quant
