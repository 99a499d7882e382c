// LocoHop against the reference, bit by bit, without a Reducer: any buckets, ranges and steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "quant/loco_hop.h"
#include "tests/comm/rank_threads.h"
#include "tests/kernels/hostile_value.h"
#include "tests/support/loco_reference.h"

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
  // Each replica gets only its part. Says how the buckets are cut, anywhere or at groups, and where
  // that cuts parameters.
  bool scatters = false;
  bool cuts_anywhere = false;
  std::vector<RowCut> cuts;
  std::vector<std::set<std::int64_t>> group_cuts;
  Dtype plain_wire = Dtype::kF32;
};

template <class T>
T one_of(std::mt19937& random, const std::vector<T>& choices) {
  return choices[random() % choices.size()];
}

// How a bucket is cut over the replicas, some of which get nothing. Its ranges are cut there too.
RowCut cut_over_replicas(Configuration& made, std::vector<ParameterRange>& ranges,
                         std::mt19937& random) {
  std::vector<std::int64_t> begins{0};
  const std::int64_t end = ranges.back().offset + ranges.back().count;
  std::vector<ParameterRange> parts;
  for (ParameterRange range : ranges) {
    while (std::ssize(begins) < made.replicas && random() % 3 != 0) {
      auto count = static_cast<std::int64_t>(random() % static_cast<unsigned>(range.count + 1));
      if (!made.cuts_anywhere) {
        const std::int64_t cut = padded(range.flat_offset + count, made.options.group_size);
        count = std::min(range.count, cut - range.flat_offset);
      }
      begins.push_back(range.offset + count);
      if (count == 0) continue;
      parts.push_back(range);
      parts.back().count = count;
      range.offset += count;
      range.flat_offset += count;
      range.count -= count;
      made.group_cuts[static_cast<std::size_t>(range.parameter)].insert(range.flat_offset);
    }
    if (range.count > 0) parts.push_back(range);
  }
  ranges = parts;
  begins.resize(static_cast<std::size_t>(made.replicas) + 1, end);
  return RowCut(std::move(begins));
}

// Excluded parameters have separate buckets, unless mixed. Large ones may be cut in two, at groups.
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
  made.cuts.clear();
  made.group_cuts.assign(made.counts.size(), {0});
  for (auto& [number, ranges] : buckets) {
    if (made.scatters) made.cuts.push_back(cut_over_replicas(made, ranges, random));
    made.buckets.push_back(std::move(ranges));
  }
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
  made.scatters = random() % 2 == 0;
  made.cuts_anywhere = random() % 2 == 0;
  if (made.scatters && random() % 2 == 0) made.plain_wire = Dtype::kBf16;
  made.mixed = !made.scatters && random() % 2 == 0;
  made.replicas = 2 + static_cast<int>(random() % 7);
  made.steps = 3 + static_cast<int>(random() % 4);
  const std::size_t count = 1 + random() % 5;
  for (std::size_t p = 0; p < count; ++p) {
    const bool is_norm = p == 0;  // at least one, for the pattern
    made.names.push_back((is_norm ? "norm." : "layer.") + std::to_string(p));
    made.counts.push_back(
        static_cast<std::int64_t>(1 + random() % (random() % 2 == 0 ? 40 : 3000)));
  }
  cut_into_buckets(made, random);
  return made;
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
float some_value(std::mt19937& random, bool hostile) {
  if (hostile) return kernels::hostile_value(random);
  return std::normal_distribution<float>()(random) *
         std::exp2(static_cast<float>(random() % 20) - 15.0F);
}

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
  plan.wires.assign(made.buckets.size(), made.plain_wire);
  plan.cuts = made.cuts;
  for (const RowCut& cut : made.cuts) {
    plan.data.push_back({{nullptr, cut.count(), Dtype::kF32, {}}});
  }
  plan.replicate_size = made.replicas;
  return plan;
}

constexpr float kOfAnother = 1234567.0F;  // an element of another replica's part

// All reductions of a step on one replica; returns what stands at the end, by parameter.
std::vector<Floats> run_step(LocoHop& hop, const Configuration& made, const Step& step, int replica,
                             std::atomic<std::uint32_t>& nonfinite) {
  std::vector<Floats> sums;
  for (const std::int64_t count : made.counts) {
    sums.emplace_back(static_cast<std::size_t>(count), kOfAnother);
  }
  Stream stream = Stream::inline_host();
  for (std::size_t k = 0; k < step.reductions.size(); ++k) {
    const Reduction& reduction = step.reductions[k];
    std::vector<Floats> memory;
    std::vector<Floats> parts;
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
      if (made.scatters) {
        Floats& part =
            parts.emplace_back(static_cast<std::size_t>(made.cuts[b].length(replica)), 9.0F);
        bucket.part = {part.data(), std::ssize(part), Dtype::kF32, {}};
        bucket.arithmetic.wire = made.plain_wire;
      }
      bucket.arithmetic.mean_divisor = reduction.divisor;
      if (made.mixed) bucket.arithmetic.divisor = reduction.divisor;
      bucket.nonfinite = &nonfinite;
      if (k == 0) static_cast<void>(hop.means(number, reduction.divisor));
      events.push_back(hop.reduce(bucket, stream));
    }
    for (std::size_t b = 0; b < made.buckets.size(); ++b) {
      events[b].wait();
      const std::int64_t begin = made.scatters ? made.cuts[b].begin(replica) : 0;
      const Floats& result = made.scatters ? parts[b] : memory[b];
      for (const ParameterRange& range : made.buckets[b]) {
        if (range.offset < begin || range.offset >= begin + std::ssize(result)) continue;
        Floats& sum = sums[static_cast<std::size_t>(range.parameter)];
        for (std::int64_t i = 0; i < range.count; ++i) {
          const float value = result[static_cast<std::size_t>(range.offset - begin + i)];
          EXPECT_TRUE(std::isfinite(value) || nonfinite != 0);
          float& place = sum[static_cast<std::size_t>(range.flat_offset + i)];
          place = k == 0 ? value : place + value;
        }
      }
    }
  }
  return sums;
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

// Plain sums of all reductions, as all_reduce forms them; means if rows are mixed.
Floats plain_sum(const Configuration& made, const Step& step, std::size_t parameter) {
  Floats all;
  for (const Reduction& reduction : step.reductions) {
    Floats total;
    for (const std::vector<Floats>& sums : reduction.sums) {
      Floats sent = sums[parameter];
      if (made.plain_wire == Dtype::kBf16) {
        for (float& value : sent) value = to_float(to_bf16(value));
      }
      if (total.empty()) {
        total = sent;
      } else {
        for (std::size_t i = 0; i < total.size(); ++i) total[i] += sent[i];
      }
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
    std::set<std::int64_t> cuts = made.group_cuts[p];
    cuts.insert(made.counts[p]);
    parameters.push_back({made.names[p], {cuts.begin(), cuts.end()}, static_cast<int>(p)});
  }
  LocoReference reference(made.options, made.replicas, std::move(parameters));
  reference.set_gathers(!made.scatters);
  return reference;
}

// What all replicas end a step with, and how the step ends.
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

std::vector<Expected> run_steps(LocoReference& reference, const Configuration& made,
                                const std::vector<Step>& steps) {
  std::vector<Expected> expected;
  for (const Step& step : steps) expected.push_back(run_step(reference, made, step));
  return expected;
}

// Runs the same with the hop on one replica. False, and a test failure, if a bit differs.
bool run_and_compare(LocoHop& hop, const Configuration& made, const Step& step, int replica,
                     const Expected& expected, const std::string& label) {
  std::atomic<std::uint32_t> nonfinite = 0;
  const std::vector<Floats> found = run_step(hop, made, step, replica, nonfinite);
  for (std::size_t p = 0; p < found.size(); ++p) {
    for (std::size_t i = 0; i < found[p].size(); ++i) {
      if (made.scatters && found[p][i] == kOfAnother) continue;
      if (same(found[p][i], expected.means[p][i])) continue;
      ADD_FAILURE() << label << ", " << made.names[p] << "[" << i << "]: " << found[p][i] << " for "
                    << expected.means[p][i] << "; " << describe(made.options) << ", "
                    << made.replicas << " replicas" << (made.scatters ? ", scattered" : "");
      return false;
    }
  }
  EXPECT_TRUE(expected.outcome != StepOutcome::kClean || nonfinite == 0);
  hop.end_step({0, expected.outcome, ""});
  if (step.scale != 1.0F) hop.scale_errors(step.scale);
  return true;
}

class LocoHopOn : public ::testing::TestWithParam<test::Path> {};

// In every other round the buckets change halfway, as when parameters are frozen or the hop goes to
// an owner that cuts its results differently.
TEST_P(LocoHopOn, EqualsTheReferenceAlsoWhereBucketsChange) {
  std::mt19937 random(11);
  const int rounds = GetParam() == test::Path::kTcp ? 30 : 120;
  for (int round = 0; round < rounds; ++round) {
    const bool moves = round % 2 == 1;
    Configuration made = random_configuration(random);
    if (moves && made.cuts_anywhere) {  // groups do not move
      made.cuts_anywhere = false;
      cut_into_buckets(made, random);
    }
    const std::vector<Step> steps = random_steps(made, random);
    LocoReference reference = reference_of(made);
    std::vector<Configuration> cuts;
    std::vector<HopPlan> plans;
    std::vector<Expected> expected;
    for (std::size_t s = 0; s < steps.size(); ++s) {
      if (moves && random() % 3 != 0) {
        if (!made.mixed && random() % 3 == 0) made.scatters = !made.scatters;
        if (!made.scatters) made.plain_wire = Dtype::kF32;
        cut_into_buckets(made, random);
      }
      cuts.push_back(made);
      plans.push_back(plan_of(made));
      reference.set_gathers(!made.scatters);
      expected.push_back(run_step(reference, made, steps[s]));
    }
    test::run_world({.size = made.replicas, .path = GetParam()}, [&](Communicator& world) {
      LocoHop hop(made.options);
      Communicator gather = world.split(0, world.rank());
      for (std::size_t s = 0; s < steps.size(); ++s) {
        const std::string label = "round " + std::to_string(round) + ", step " + std::to_string(s);
        // With the same replicas. The buckets of parts change only with the owner.
        const bool is_another_owner =
            moves && s > 0 && (s == 2 || cuts[s - 1].scatters || cuts[s].scatters);
        if (moves || s == 0) hop.prepare(plans[s]);
        if (is_another_owner) {
          hop.bind({}, {});
          hop.prepare(plans[s]);
        }
        if (is_another_owner || s == 0) {
          hop.bind(world, hop.needs_gather_group() ? gather : Communicator());
        }
        if (!run_and_compare(hop, cuts[s], steps[s], world.rank(), expected[s], label)) return;
      }
      EXPECT_EQ(hop.steps(), reference.steps());
      hop.bind({}, {});
    });
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, LocoHopOn, testing::Values(test::Path::kDirect, test::Path::kTcp),
                         [](const auto& row) { return test::name(row.param); });

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

// Runs some steps, and then more of them in another world from the saved state: with other
// replicas, buckets, groups, betas and kinds of errors.
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
    next.scatters = !next.mixed && random() % 2 == 0;
    if (!next.scatters) next.plain_wire = Dtype::kF32;
    cut_into_buckets(next, random);
    const bool lacks_half = made.scatters && !next.scatters && next.options.gather != Code::kBf16;
    const std::vector<Step> more = random_steps(next, random);
    const bool before_bind = random() % 2 == 0;

    LocoReference reference = reference_of(made);
    const std::vector<Expected> expected = run_steps(reference, made, steps);
    LocoReference other = reference_of(next);
    other.load(reference);
    const std::vector<Expected> expected_more = run_steps(other, next, more);

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
      if (before_bind) hop.load_state(all.state, !lacks_half);
      hop.prepare(plan);
      hop.bind(world, world.split(0, world.rank()));
      if (!before_bind) {  // what this rank needs is enough
        std::vector<LocoHop::SavedKey> keys;
        for (const HopState& one : all.state) keys.push_back({one.key, one.data.count});
        const std::vector<std::string> wanted = hop.keys_to_load(keys);
        std::vector<HopState> part = all.state;
        std::erase_if(part, [&](const HopState& one) {
          return std::ranges::find(wanted, one.key) == wanted.end();
        });
        for (const std::string& key : wanted) {
          EXPECT_FALSE(next.scatters && key.find("/gather/") != std::string::npos) << key;
        }
        hop.load_state(part, !lacks_half);
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
