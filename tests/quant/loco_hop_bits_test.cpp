// LocoHop against the reference, to the bit, without a Reducer: any buckets, ranges and steps.
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <map>
#include <random>
#include <span>

#include "loco_steps.h"
#include "tests/comm/rank_threads.h"
#include "tests/support/loco_reference.h"

namespace hsdp::quant {
namespace {

using test::LocoReference;

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

}  // namespace
}  // namespace hsdp::quant
