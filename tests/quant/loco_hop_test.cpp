// LocoHop against the reference, to the bit, without a Reducer: any buckets, ranges and steps.
#include "quant/loco_hop.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <span>
#include <thread>

#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "quant/loco_exchange.h"
#include "tests/comm/rank_threads.h"
#include "tests/kernels/hostile_value.h"
#include "tests/support/hop_contract.h"
#include "tests/support/loco_reference.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::quant {
namespace {

using test::LocoReference;
using Floats = LocoReference::Floats;

struct Configuration {
  LocoOptions options;
  int replicas = 2;
  std::vector<std::string> names;
  std::vector<std::int64_t> counts;
  std::vector<std::vector<ParameterRange>> buckets;
  int steps = 4;
  bool mixed = false;  // excluded parameters share buckets with others, as in rows of replica_hook
};

template <class T>
T one_of(std::mt19937& random, const std::vector<T>& choices) {
  return choices[random() % choices.size()];
}

// Excluded ones in buckets of their own, unless mixed; large ones may be cut over two, at groups.
void cut_into_buckets(Configuration& made, std::mt19937& random) {
  std::map<int, std::vector<ParameterRange>> buckets;
  for (std::size_t p = 0; p < made.counts.size(); ++p) {
    const bool apart = !made.mixed && is_excluded(made.options, made.names[p]);
    const std::int64_t cut =
        std::min(made.counts[p], static_cast<std::int64_t>(random() % 4) * made.options.group_size);
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, cut}, {cut, made.counts[p]}}) {
      if (begin == end) continue;
      std::vector<ParameterRange>& bucket =
          buckets[(apart ? 10 : 0) + static_cast<int>(random() % 3)];
      std::int64_t offset = static_cast<std::int64_t>(random() % 3);  // a gap
      if (!bucket.empty()) offset += bucket.back().offset + bucket.back().count;
      bucket.push_back({static_cast<int>(p), offset, end - begin, begin});
    }
  }
  made.buckets.clear();
  for (auto& [number, ranges] : buckets) made.buckets.push_back(std::move(ranges));
}

Configuration random_configuration(std::mt19937& random) {
  Configuration made;
  LocoOptions& options = made.options;
  options.bits = one_of(random, std::vector{4, 8});
  options.group_size = one_of(random, std::vector{32, 64, 64, 96, 128, 512});
  options.scale_dtype = one_of(random, std::vector{Dtype::kBf16, Dtype::kF32});
  options.err_beta = one_of(random, std::vector{0.0, 0.5, 0.8, 0.95});
  options.reset_T = one_of(random, std::vector<std::int64_t>{0, 1, 2, 3, 1024});
  options.error_dtype = one_of(random, std::vector{Dtype::kU8, Dtype::kF32});
  options.gather =
      one_of(random, std::vector<std::optional<Code>>{{}, Code::kInt4, Code::kInt8, Code::kBf16});
  options.error_feedback = random() % 6 != 0;
  options.warmup_steps = one_of(random, std::vector<std::int64_t>{0, 0, 0, 1, 2});
  options.stochastic_error = options.error_dtype == Dtype::kU8 && random() % 3 == 0;
  options.seed = random();
  if (random() % 3 == 0) options.exclude = {"*norm*"};
  made.mixed = random() % 2 == 0;
  made.replicas = 2 + static_cast<int>(random() % 7);
  made.steps = 3 + static_cast<int>(random() % 4);
  const std::size_t count = 1 + random() % 5;
  for (std::size_t p = 0; p < count; ++p) {
    const bool is_norm = p == 0;  // one at least, for the pattern
    made.names.push_back((is_norm ? "norm." : "layer.") + std::to_string(p));
    made.counts.push_back(
        static_cast<std::int64_t>(1 + random() % (random() % 2 == 0 ? 40 : 3000)));
  }
  cut_into_buckets(made, random);
  return made;
}

float some_value(std::mt19937& random, bool hostile) {
  if (hostile) return kernels::hostile_value(random);
  return std::normal_distribution<float>()(random) *
         std::exp2(static_cast<float>(random() % 20) - 15.0F);
}

// What all replicas do in one reduction.
struct Reduction {
  std::vector<std::vector<Floats>> sums;  // [replica][parameter]
  float divisor = 1.0F;
};
struct Step {
  std::vector<Reduction> reductions;
  bool drops = false;
  float scale = 1.0F;  // of the errors, after it
};

std::vector<Step> random_steps(const Configuration& made, std::mt19937& random) {
  std::vector<Step> steps(static_cast<std::size_t>(made.steps));
  for (Step& step : steps) {
    step.drops = random() % 6 == 0;
    if (random() % 5 == 0) step.scale = 0.3F;
    const bool hostile = random() % 8 == 0;
    const float divisor = one_of(random, std::vector{1.0F, 4.0F, 3.0F, -0.7F, 1024.0F});
    step.reductions.resize(1 + random() % 2);
    for (Reduction& reduction : step.reductions) {
      reduction.divisor = divisor;
      reduction.sums.resize(static_cast<std::size_t>(made.replicas));
      for (std::vector<Floats>& sums : reduction.sums) {
        for (const std::int64_t count : made.counts) {
          sums.emplace_back(static_cast<std::size_t>(count));
          for (float& value : sums.back()) value = some_value(random, hostile);
        }
      }
    }
  }
  return steps;
}

HopPlan plan_of(const Configuration& made) {
  HopPlan plan;
  for (std::size_t p = 0; p < made.names.size(); ++p) {
    plan.parameters.push_back({made.names[p], {made.counts[p]}});
  }
  plan.ranges = made.buckets;
  plan.wires.assign(made.buckets.size(), Dtype::kF32);
  plan.replicate_size = made.replicas;
  return plan;
}

bool is_finite(const std::vector<Floats>& all) {
  for (const Floats& values : all) {
    for (const float value : values) {
      if (!std::isfinite(value)) return false;
    }
  }
  return true;
}

bool same(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

// All reductions of a step on one replica; what stands in the end, by parameter.
std::vector<Floats> run_step(LocoHop& hop, const Configuration& made, const Step& step, int replica,
                             std::atomic<std::uint32_t>& nonfinite) {
  std::vector<Floats> sums;
  for (const std::int64_t count : made.counts) sums.emplace_back(static_cast<std::size_t>(count));
  Stream stream = Stream::inline_host();
  for (std::size_t k = 0; k < step.reductions.size(); ++k) {
    const Reduction& reduction = step.reductions[k];
    std::vector<Floats> memory;
    std::vector<Event> events;
    for (std::size_t b = 0; b < made.buckets.size(); ++b) {
      const std::vector<ParameterRange>& ranges = made.buckets[b];
      memory.emplace_back(static_cast<std::size_t>(ranges.back().offset + ranges.back().count),
                          7.0F);
      for (const ParameterRange& range : ranges) {
        const Floats& given =
            reduction
                .sums[static_cast<std::size_t>(replica)][static_cast<std::size_t>(range.parameter)];
        std::copy_n(given.begin() + range.flat_offset, range.count,
                    memory.back().begin() + range.offset);
      }
    }
    for (std::size_t b = 0; b < made.buckets.size(); ++b) {  // all in flight together
      const int number = static_cast<int>(b);
      HopBucket bucket;
      bucket.bucket = number;
      bucket.data = {memory[b].data(), std::ssize(memory[b]), Dtype::kF32, {}};
      bucket.arithmetic.mean_divisor = reduction.divisor;
      if (made.mixed) bucket.arithmetic.divisor = reduction.divisor;
      bucket.nonfinite = &nonfinite;
      if (k == 0) static_cast<void>(hop.means(number, reduction.divisor));
      events.push_back(hop.reduce(bucket, stream));
    }
    for (std::size_t b = 0; b < made.buckets.size(); ++b) {
      events[b].wait();
      for (const ParameterRange& range : made.buckets[b]) {
        Floats& sum = sums[static_cast<std::size_t>(range.parameter)];
        for (std::int64_t i = 0; i < range.count; ++i) {
          const float value = memory[b][static_cast<std::size_t>(range.offset + i)];
          float& place = sum[static_cast<std::size_t>(range.flat_offset + i)];
          place = k == 0 ? value : place + value;
        }
      }
    }
  }
  return sums;
}

// Plain sums of all reductions, as all_reduce forms them; means where rows are mixed.
Floats plain_sum(const Configuration& made, const Step& step, std::size_t parameter) {
  Floats all;
  for (const Reduction& reduction : step.reductions) {
    Floats total = reduction.sums[0][parameter];
    for (std::size_t r = 1; r < reduction.sums.size(); ++r) {
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += reduction.sums[r][parameter][i];
    }
    if (made.mixed) {
      for (float& value : total) value = value / reduction.divisor;
    }
    if (all.empty()) {
      all = total;
    } else {
      for (std::size_t i = 0; i < total.size(); ++i) all[i] += total[i];
    }
  }
  return all;
}

LocoReference reference_of(const Configuration& made) {
  std::vector<LocoReference::Parameter> parameters;
  for (std::size_t p = 0; p < made.names.size(); ++p) {
    parameters.push_back({made.names[p], {0, made.counts[p]}, static_cast<int>(p)});
  }
  return {made.options, made.replicas, std::move(parameters)};
}

// What all replicas end a step with, and how it ends.
struct Expected {
  std::vector<Floats> means;
  StepOutcome outcome = StepOutcome::kClean;
};

Expected run_step(LocoReference& reference, const Configuration& made, const Step& step) {
  Expected expected;
  for (const Reduction& reduction : step.reductions) {
    expected.means = reference.reduce(reduction.sums, reduction.divisor);
  }
  for (std::size_t p = 0; p < expected.means.size(); ++p) {
    if (reference.is_plain(p)) expected.means[p] = plain_sum(made, step, p);
  }
  if (step.drops) {
    expected.outcome = StepOutcome::kDropped;
  } else if (!is_finite(expected.means)) {
    expected.outcome = StepOutcome::kOverflow;
  }
  reference.end_step(expected.outcome == StepOutcome::kClean);
  if (step.scale != 1.0F) reference.scale_errors(step.scale);
  return expected;
}

// The same by the hop on one replica; false, and a test failure, where a bit differs.
bool run_and_compare(LocoHop& hop, const Configuration& made, const Step& step, int replica,
                     const Expected& expected, const std::string& label) {
  std::atomic<std::uint32_t> nonfinite = 0;
  const std::vector<Floats> found = run_step(hop, made, step, replica, nonfinite);
  for (std::size_t p = 0; p < found.size(); ++p) {
    for (std::size_t i = 0; i < found[p].size(); ++i) {
      if (same(found[p][i], expected.means[p][i])) continue;
      ADD_FAILURE() << label << ", " << made.names[p] << "[" << i << "]: " << found[p][i] << " for "
                    << expected.means[p][i] << "; " << describe(made.options) << ", "
                    << made.replicas << " replicas";
      return false;
    }
  }
  EXPECT_TRUE(expected.outcome != StepOutcome::kClean || nonfinite == 0);
  hop.end_step({0, expected.outcome, ""});
  if (step.scale != 1.0F) hop.scale_errors(step.scale);
  return true;
}

class LocoHopOn : public ::testing::TestWithParam<test::Path> {};

TEST_P(LocoHopOn, EqualsTheReference) {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    const Configuration made = random_configuration(random);
    const std::vector<Step> steps = random_steps(made, random);
    LocoReference reference = reference_of(made);
    std::vector<Expected> expected;
    for (const Step& step : steps) expected.push_back(run_step(reference, made, step));
    test::run_world({.size = made.replicas, .path = GetParam()}, [&](Communicator& world) {
      LocoHop hop(made.options);
      const HopPlan plan = plan_of(made);
      hop.prepare(plan);
      hop.bind(world, world.split(0, world.rank()));
      for (std::size_t s = 0; s < steps.size(); ++s) {
        const std::string label = "round " + std::to_string(round) + ", step " + std::to_string(s);
        if (!run_and_compare(hop, made, steps[s], world.rank(), expected[s], label)) return;
      }
      EXPECT_EQ(hop.steps(), reference.steps());
      hop.bind({}, {});
    });
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, LocoHopOn, testing::Values(test::Path::kDirect, test::Path::kTcp),
                         [](const auto& row) { return test::name(row.param); });

TEST(LocoHop, KeepsWhatEveryHopKeeps) {
  const auto make = [](const LocoOptions& options) {
    return [options] { return std::make_shared<LocoHop>(options); };
  };
  for (const test::MeshShape shape :
       {test::MeshShape{2, 1}, test::MeshShape{2, 2}, test::MeshShape{3, 2}}) {
    test::check_hop_contract(make({.reset_T = 2}), shape);
    test::check_hop_contract(
        make({.group_size = 32, .error_dtype = Dtype::kF32, .exclude = {"norm"}}), shape);
  }
  test::check_hop_contract(make({.bits = 8, .gather = Code::kBf16}), {2, 2});
  test::check_hop_contract(make({.error_feedback = false}), {2, 2});
}

// Another cut into buckets in the middle of a run, as when parameters are frozen.
TEST(LocoHop, TakesItsErrorsAlongToOtherBuckets) {
  std::mt19937 random(12);
  for (int round = 0; round < 40; ++round) {
    Configuration made = random_configuration(random);
    const std::vector<Step> steps = random_steps(made, random);
    std::vector<Configuration> cuts;
    for (std::size_t s = 0; s < steps.size(); ++s) {
      if (random() % 3 != 0) cut_into_buckets(made, random);
      cuts.push_back(made);
    }
    LocoReference reference = reference_of(made);
    std::vector<Expected> expected;
    for (const Step& step : steps) expected.push_back(run_step(reference, made, step));
    test::run_world({.size = made.replicas}, [&](Communicator& world) {
      LocoHop hop(made.options);
      Communicator gather = world.split(0, world.rank());
      std::vector<HopPlan> plans;
      for (const Configuration& cut : cuts) plans.push_back(plan_of(cut));
      for (std::size_t s = 0; s < steps.size(); ++s) {
        const std::string label = "round " + std::to_string(round) + ", step " + std::to_string(s);
        hop.prepare(plans[s]);
        if (s == 0) hop.bind(world, gather);
        if (s == 2) {  // another owner, of the same replicas
          hop.bind({}, {});
          hop.prepare(plans[s]);
          hop.bind(world, gather);
        }
        if (!run_and_compare(hop, cuts[s], steps[s], world.rank(), expected[s], label)) return;
      }
      hop.bind({}, {});
    });
    if (HasFailure()) return;
  }
}

// A state in memory of its own.
struct OwnState {
  std::map<std::string, std::vector<std::byte>> memory;
  std::vector<HopState> state;

  void add(std::span<const HopState> from) {
    for (HopState one : from) {
      const auto* const bytes = static_cast<const std::byte*>(one.data.data);
      std::vector<std::byte>& kept = memory[one.key];
      const bool is_new = kept.empty();
      kept.assign(bytes, bytes + one.data.size_in_bytes());
      one.data.data = kept.data();
      if (is_new) state.push_back(one);
    }
  }
};

// Runs some steps, and more of them in another world from what was saved: with other replicas,
// buckets, groups, betas and kinds of errors.
TEST(LocoHop, LoadsWhatAnotherOneHasSaved) {
  std::mt19937 random(13);
  for (int round = 0; round < 60; ++round) {
    Configuration made = random_configuration(random);
    made.options.error_feedback = true;
    const std::vector<Step> steps = random_steps(made, random);
    Configuration next = made;
    if (random() % 2 == 0) next.replicas = 2 + static_cast<int>(random() % 4);
    if (random() % 3 == 0) next.options.group_size = one_of(random, std::vector{32, 64, 96});
    if (random() % 3 == 0) next.options.err_beta = one_of(random, std::vector{0.0, 0.5, 0.9});
    if (random() % 3 == 0) {
      next.options.error_dtype = one_of(random, std::vector{Dtype::kU8, Dtype::kF32});
      next.options.stochastic_error = false;
    }
    cut_into_buckets(next, random);
    const std::vector<Step> more = random_steps(next, random);
    const bool before_bind = random() % 2 == 0;

    LocoReference reference = reference_of(made);
    std::vector<Expected> expected;
    for (const Step& step : steps) expected.push_back(run_step(reference, made, step));
    LocoReference other = reference_of(next);
    other.load(reference);
    std::vector<Expected> expected_more;
    for (const Step& step : more) expected_more.push_back(run_step(other, next, step));

    OwnState all;
    std::mutex mutex;
    const std::string label = "round " + std::to_string(round);
    test::run_world({.size = made.replicas}, [&](Communicator& world) {
      LocoHop hop(made.options);
      const HopPlan plan = plan_of(made);
      hop.prepare(plan);
      hop.bind(world, world.split(0, world.rank()));
      for (std::size_t s = 0; s < steps.size(); ++s) {
        if (!run_and_compare(hop, made, steps[s], world.rank(), expected[s], label)) return;
      }
      const std::scoped_lock lock(mutex);
      all.add(hop.state());
      hop.bind({}, {});
    });
    if (HasFailure()) return;
    test::run_world({.size = next.replicas}, [&](Communicator& world) {
      LocoHop hop(next.options);
      const HopPlan plan = plan_of(next);
      if (before_bind) hop.load_state(all.state);
      hop.prepare(plan);
      hop.bind(world, world.split(0, world.rank()));
      if (!before_bind) {  // what this rank needs will do
        std::vector<LocoHop::SavedKey> keys;
        for (const HopState& one : all.state) keys.push_back({one.key, one.data.count});
        const std::vector<std::string> wanted = hop.keys_to_load(keys);
        std::vector<HopState> part = all.state;
        std::erase_if(part, [&](const HopState& one) {
          return std::ranges::find(wanted, one.key) == wanted.end();
        });
        hop.load_state(part);
      }
      EXPECT_EQ(hop.steps(), reference.steps());
      for (std::size_t s = 0; s < more.size(); ++s) {
        const std::string then = label + ", step " + std::to_string(s) + " after loading";
        if (!run_and_compare(hop, next, more[s], world.rank(), expected_more[s], then)) return;
      }
      hop.bind({}, {});
    });
    if (HasFailure()) return;
  }
}

// One group: a 7 and 63 times `rest`; the same on both replicas. Its errors after one step.
std::vector<QuantizationError> errors_with(float rest, std::int64_t every = 1) {
  Configuration made;
  made.options.error_every = every;
  made.names = {"layer.weight"};
  made.counts = {64};
  made.buckets = {{{0, 0, 64, 0}}};
  Step step;
  step.reductions.push_back({{2, {Floats(64, rest)}}, 1.0F});
  for (std::vector<Floats>& sums : step.reductions[0].sums) sums[0][0] = 7.0F;
  std::vector<QuantizationError> errors;
  test::run_world({.size = 2}, [&](Communicator& world) {
    LocoHop hop(made.options);
    const HopPlan plan = plan_of(made);
    hop.prepare(plan);
    hop.bind(world, world.split(0, world.rank()));
    std::atomic<std::uint32_t> nonfinite = 0;
    run_step(hop, made, step, world.rank(), nonfinite);
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
  std::vector<QuantizationError> errors = errors_with(1.25F);  // 7, and 1 for the rest
  ASSERT_EQ(errors.size(), 1U);
  EXPECT_EQ(errors[0].parameter, "layer.weight");
  EXPECT_NEAR(errors[0].scattered, std::sqrt(63 * 0.0625 / (49 + 63 * 1.5625)), 1e-6);
  EXPECT_EQ(errors[0].gathered, 0.0);  // 14 and 2 are 7 and 1 again
  EXPECT_TRUE(errors_with(1.25F, 0).empty());
  testing::internal::CaptureStderr();
  errors = errors_with(0.5F);
  EXPECT_NEAR(errors[0].scattered, std::sqrt(63 * 0.25 / (49 + 63 * 0.25)), 1e-6);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("'layer.weight': quantization changed its gradient by 0.49 of its norm"),
            std::string::npos)
      << text;
}

// A hop with errors of one parameter of 256 elements, on replica `rank` of `world`; the whole of
// it, or another part.
struct Used {
  explicit Used(Communicator& world, LocoOptions options = {}) : hop(std::move(options)) {
    made.names = {"layer.weight"};
    made.counts = {256};
    made.buckets = {{{0, 0, 128, 0}}};
    made.replicas = world.size();
    plan = plan_of(made);
    gather = world.split(0, world.rank());
    hop.prepare(plan);
    hop.bind(world, gather);
    Step step;
    step.reductions.push_back({{static_cast<std::size_t>(world.size()), {Floats(256, 1.3F)}}});
    std::atomic<std::uint32_t> nonfinite = 0;
    run_step(hop, made, step, world.rank(), nonfinite);
    hop.end_step({0, StepOutcome::kClean, ""});
    hop.bind({}, {});
  }
  Configuration made;
  HopPlan plan;
  Communicator gather;
  LocoHop hop;
};

TEST(LocoHop, RefusesAnotherPlaceThatItHasNoErrorsOf) {
  test::run_world({.size = 2}, [](Communicator& world) {
    Used used(world);
    // As another cut, or another shard count, would do.
    used.made.buckets = {{{0, 0, 128, 128}}};
    HopPlan other = plan_of(used.made);
    used.hop.prepare(other);
    try {
      used.hop.bind(world, used.gather);
      ADD_FAILURE() << "expected a UsageError";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("the part of 'layer.weight'"), std::string::npos)
          << error.what();
    }
    used.hop.bind({}, {});
    // Another number of replicas, and what the message says to do.
    other.replicate_size = 1;
    used.hop.prepare(other);
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
    EXPECT_EQ(used.hop.word(), "1 steps, moved");
    Step step;
    step.reductions.push_back({{2, {Floats(256, 1.3F)}}});
    std::atomic<std::uint32_t> nonfinite = 0;
    run_step(used.hop, used.made, step, world.rank(), nonfinite);
    EXPECT_EQ(used.hop.word(), "1 steps, moved");  // the same all through the step
    used.hop.end_step({0, StepOutcome::kDropped, ""});
    EXPECT_EQ(used.hop.word(), "1 steps");
    used.hop.scale_errors(0.5F);
    EXPECT_LE(used.hop.word().size(), StepParty::kMaxWordBytes);
    EXPECT_NE(used.hop.word(), "1 steps");
    used.hop.bind({}, {});
  });
}

// The next Reducer's first buckets go out while one rank is still in its backward.
TEST(LocoHop, GoesToAnotherReducer) {
  const auto second_step = [](bool changes) {
    std::vector<Floats> means(2);
    test::run_mesh({2, 1}, [&](const Mesh& mesh) {
      const auto hop = std::make_shared<LocoHop>();
      const auto make = [&] {
        auto reducer = std::make_unique<Reducer>(
            mesh, ReducerOptions{.bucket_bytes = 4096, .replica_hop = hop});
        for (const char* const name : {"a", "b"}) {
          reducer->register_parameter({.name = name, .shape = {1024}});
        }
        return reducer;
      };
      std::unique_ptr<Reducer> reducer = make();
      for (int step = 0; step < 2; ++step) {
        if (step == 1 && changes) {
          reducer.reset();
          reducer = make();
        }
        Floats gradient(1024);
        for (std::size_t i = 0; i < gradient.size(); ++i) {
          gradient[i] = std::sin(static_cast<float>(i * (mesh.rank() + 1U)));
        }
        reducer->begin_microbatch({.last = true});
        for (const char* const name : {"a", "b"}) {
          if (mesh.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
          reducer->gradient_ready(name, {.data = gradient.data(), .shape = {1024}});
        }
        reducer->end_microbatch();
        const TensorView mean = reducer->shard("a");
        const auto* const values = static_cast<const float*>(mean.data);
        means[static_cast<std::size_t>(mesh.rank())] = Floats(values, values + mean.count);
      }
      EXPECT_EQ(hop->steps(), 2);
    });
    return means;
  };
  EXPECT_EQ(second_step(true), second_step(false));
}

TEST(LocoHop, LetsWhatItExcludesBeFrozen) {
  test::run_world({.size = 2}, [](Communicator& world) {
    HopPlan plan;
    plan.parameters = {{"norm", {32}}, {"weight", {64}}};
    plan.ranges = {{{0, 0, 32, 0}, {1, 32, 64, 0}}};
    plan.replicate_size = 2;
    LocoHop hop({.exclude = {"norm"}});
    hop.prepare(plan);
    hop.bind(world, world.split(0, world.rank()));
    HopPlan frozen = plan;
    frozen.parameters = {{"weight", {64}}};
    frozen.ranges = {{{0, 0, 64, 0}}};
    EXPECT_NO_THROW(hop.prepare(frozen));
    hop.bind({}, {});
  });
}

TEST(LocoHop, CountsItsMemory) {
  HopPlan plan;
  plan.parameters = {{"layer.weight", {8192}}};
  plan.ranges = {{{0, 0, 8192, 0}}};
  plan.replicate_size = 2;
  const auto bytes_of = [&plan](const LocoOptions& options) {
    LocoHop hop(options);
    hop.prepare(plan);
    return plan.memory.of(MemoryKind::kReplicaHop).live;
  };
  // 1.0625 an element and for each that it owns, twice.
  EXPECT_EQ(bytes_of({}), 2 * (8192 + 4096) * 17 / 16);
  EXPECT_EQ(bytes_of({.error_dtype = Dtype::kF32}), 2 * (8192 + 4096) * 4);
  EXPECT_EQ(bytes_of({.gather = Code::kBf16}), 2 * 8192 * 17 / 16);
  EXPECT_EQ(bytes_of({.error_feedback = false}), 0);
}

TEST(LocoHop, RefusesAPatternThatMatchesNothing) {
  HopPlan plan;
  plan.parameters = {{"layer.weight", {64}}};
  plan.ranges = {{{0, 0, 64, 0}}};
  plan.replicate_size = 2;
  LocoHop hop({.exclude = {"*norm*"}});
  try {
    hop.prepare(plan);
    ADD_FAILURE() << "expected a UsageError";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'*norm*', which matches none"), std::string::npos) << text;
    EXPECT_NE(text.find("layer.weight"), std::string::npos) << text;
  }
  hop.bind({}, {});  // as its owner lets go
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
  const auto refused = [](const LocoOptions& options) {
    try {
      const LocoHop hop(options);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refused({.bits = 5}).find("bits: expected 4 or 8, got 5"), std::string::npos);
  EXPECT_NE(refused({.group_size = 100}).find("multiple of 32"), std::string::npos);
  EXPECT_NE(refused({.err_beta = 1.0}).find("err_beta"), std::string::npos);
  EXPECT_NE(refused({.error_dtype = Dtype::kF32, .stochastic_error = true}).find("stochastic"),
            std::string::npos);
  EXPECT_EQ(refused({}), "");
}

}  // namespace
}  // namespace hsdp::quant
