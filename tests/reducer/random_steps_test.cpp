// Random steps: everything the numeric rules depend on is drawn from a seed, and every bit of every
// result must equal the reference's.
//
// A failure names the seed and all that was drawn from it. The seeds are fixed, so a rerun runs the
// same steps.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <sstream>
#include <utility>

#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

constexpr int kSeedCount = 100;
constexpr int kStepsPerSeed = 2;  // through one Reducer: nothing of the first may affect the second
constexpr int kMostMicrobatches = 6;

using Syncs = std::vector<Sync>;

struct RandomStep {
  StepCase what;                      // its own schedule stays empty
  std::vector<Syncs> schedules;       // per group
  std::size_t factor_set_before = 0;  // this microbatch, or finish()
  std::vector<bool> by_flags;         // per microbatch; else by an explicit sync
};

// All steps of one Reducer.
struct RandomJob {
  std::uint64_t seed = 0;
  MeshShape shape;
  ReducerOptions options;
  Delivery delivery;
  std::vector<ParameterSpec> parameters;
  std::vector<RandomStep> steps;
};

template <typename T, std::size_t n>
T one_of(Random& random, const std::array<T, n>& choices) {
  return choices[static_cast<std::size_t>(random.integer(0, static_cast<int>(n) - 1))];
}

bool coin(Random& random) { return random.integer(0, 1) == 1; }

Dtype random_dtype(Random& random) { return one_of(random, kDtypes); }

ReducerOptions random_options(Random& random) {
  ReducerOptions options;
  if (coin(random)) options.reduce_dtype = random_dtype(random);
  if (coin(random)) options.replica_dtype = random_dtype(random);
  options.layout = one_of(random, std::array{Layout::kFlat, Layout::kDim0, Layout::kWhole});
  options.bucket_bytes = one_of(random, std::array<std::int64_t, 4>{64, 500, 4 << 10, 1 << 20});
  options.missing = one_of(random, std::array{Missing::kError, Missing::kZero});
  options.accumulate_dtype =
      one_of(random, std::array{AccumulateDtype::kF32, AccumulateDtype::kParam});
  options.shard_over = one_of(random, std::array{ShardOver::kShard, ShardOver::kMesh});
  return options;
}

std::string group_name(std::size_t group) { return "group" + std::to_string(group); }

std::vector<ParameterSpec> random_parameters(Random& random, int group_count) {
  std::vector<ParameterSpec> parameters(static_cast<std::size_t>(random.integer(group_count, 5)));
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    ParameterSpec& spec = parameters[p];
    spec.name = "parameter" + std::to_string(p);
    for (int axis = random.integer(0, 3); axis > 0; --axis) {
      spec.shape.push_back(random.integer(axis == 1 ? 0 : 1, 13));
    }
    spec.dtype = random_dtype(random);
    if (coin(random)) spec.reduce_dtype = random_dtype(random);
    spec.group = group_name(p % static_cast<std::size_t>(group_count));
  }
  return parameters;
}

// Ordinary values, subnormals, the largest values of a dtype that the gradient may travel in, or
// all of these.
ExponentRange random_exponents(Random& random, Dtype dtype) {
  constexpr std::array<ExponentRange, 4> kOfF16{{{-12, 11}, {-26, -13}, {11, 15}, {-26, 15}}};
  constexpr std::array<ExponentRange, 3> kBeyondF16{{{-150, -124}, {118, 126}, {-150, 126}}};
  const bool beyond = dtype != Dtype::kF16 && random.integer(0, 2) == 0;
  return beyond ? one_of(random, kBeyondF16) : one_of(random, kOfF16);
}

// Some gradients are missing, but each parameter has one on some rank.
Gradients random_gradients(Random& random, const ParameterSpec& spec, std::size_t microbatch_count,
                           int world_size, bool holes) {
  const ExponentRange exponents = random_exponents(random, spec.dtype);
  Gradients gradients(microbatch_count);
  for (auto& ranks : gradients) {
    for (int rank = 0; rank < world_size; ++rank) {
      const bool keep = &ranks == &gradients.front() && rank == 0;
      ranks.emplace_back();
      if (holes && !keep && random.integer(0, 3) == 0) continue;
      ranks.back() = random_values(element_count(spec.shape), spec.dtype, random.next(), exponents);
    }
  }
  return gradients;
}

// Draws any sync for any group; only a microbatch with `all` in every group ends the step.
std::vector<Syncs> random_schedules(Random& random, std::size_t group_count, bool finish) {
  const int microbatch_count = random.integer(1, kMostMicrobatches);
  std::vector<Syncs> schedules(group_count);
  for (int m = 0; m < microbatch_count; ++m) {
    const bool ends = m + 1 == microbatch_count && !finish;
    const auto pending =
        static_cast<std::size_t>(random.integer(0, static_cast<int>(group_count) - 1));
    for (std::size_t group = 0; group < group_count; ++group) {
      const auto sync = ends ? Sync::kAll
                        : group == pending
                            ? one_of(random, std::array{Sync::kNone, Sync::kShard})
                            : one_of(random, std::array{Sync::kNone, Sync::kShard, Sync::kAll});
      schedules[group].push_back(sync);
    }
  }
  return schedules;
}

RandomStep random_step_of(Random& random, const RandomJob& job, std::size_t group_count) {
  RandomStep step;
  StepCase& what = step.what;
  what.parameters = job.parameters;
  what.finish = coin(random);
  step.schedules = random_schedules(random, group_count, what.finish);
  const std::size_t microbatch_count = step.schedules.front().size();
  for (const ParameterSpec& spec : job.parameters) {
    what.gradients.push_back(random_gradients(random, spec, microbatch_count, job.shape.size(),
                                              job.options.missing == Missing::kZero));
  }
  if (coin(random)) what.divide_factor = std::ldexp(1.0 + random.uniform(), random.integer(-9, 12));
  what.loss_scale = one_of(random, std::array{1.0, 1.0, 1024.0, 1000.7});
  const auto last = static_cast<int>(microbatch_count) - (what.finish ? 0 : 1);
  step.factor_set_before = static_cast<std::size_t>(random.integer(0, last));
  for (std::size_t m = 0; m < microbatch_count; ++m) {
    bool same = true;
    for (const Syncs& schedule : step.schedules) same &= schedule[m] == step.schedules[0][m];
    step.by_flags.push_back(!same || coin(random));
  }
  return step;
}

RandomJob random_job(std::uint64_t seed) {
  Random random(seed);
  RandomJob job{.seed = seed,
                .shape = {.replicate = random.integer(1, 3), .shard = random.integer(1, 4)},
                .options = random_options(random),
                .delivery = {.order = Order::kRandom,
                             .thread_count = random.integer(1, 2),
                             .transposed = coin(random),
                             .seed = seed}};
  const int group_count = random.integer(1, 2);
  job.parameters = random_parameters(random, group_count);
  for (int i = 0; i < kStepsPerSeed; ++i) {
    job.steps.push_back(random_step_of(random, job, static_cast<std::size_t>(group_count)));
  }
  return job;
}

RankResult run_random_step(Reducer& reducer, const RandomStep& step, int rank,
                           const Delivery& delivery) {
  reducer.set_loss_scale(step.what.loss_scale);
  for (std::size_t m = 0; m < step.by_flags.size(); ++m) {
    if (m == step.factor_set_before) reducer.set_gradient_divide_factor(step.what.divide_factor);
    MicrobatchOptions options;
    if (!step.by_flags[m]) options.sync = step.schedules[0][m];
    for (std::size_t group = 0; step.by_flags[m] && group < step.schedules.size(); ++group) {
      const Sync sync = step.schedules[group][m];
      reducer.set_requires_gradient_sync(sync != Sync::kNone, group_name(group));
      reducer.set_requires_all_reduce(sync == Sync::kAll, group_name(group));
    }
    run_microbatch(reducer, step.what, static_cast<int>(m), rank, options, delivery);
  }
  if (step.factor_set_before == step.by_flags.size()) {
    reducer.set_gradient_divide_factor(step.what.divide_factor);
  }
  if (step.what.finish) reducer.finish();
  return read_result(reducer, step.what);
}

std::string_view name(Sync sync) {
  return sync == Sync::kNone ? "none" : sync == Sync::kShard ? "shard" : "all";
}

std::string described(const RandomJob& job, std::size_t index) {
  const RandomStep& step = job.steps[index];
  const ReducerOptions& options = job.options;
  const auto wire = [](std::optional<Dtype> dtype) { return dtype ? name(*dtype) : "default"; };
  std::ostringstream text;
  text << "seed " << job.seed << ", step " << index << ", mesh " << to_string(job.shape);
  for (std::size_t group = 0; group < step.schedules.size(); ++group) {
    text << ", " << group_name(group) << ":";
    for (const Sync sync : step.schedules[group]) text << ' ' << name(sync);
    if (step.what.finish) text << " finish()";
  }
  text << ", divide factor ";
  if (step.what.divide_factor) {
    text << *step.what.divide_factor;
  } else {
    text << "default";
  }
  text << " set before microbatch " << step.factor_set_before << ", loss scale "
       << step.what.loss_scale << ", reduce_dtype " << wire(options.reduce_dtype)
       << ", replica_dtype " << wire(options.replica_dtype) << ", accumulate_dtype "
       << (options.accumulate_dtype == AccumulateDtype::kF32 ? "f32" : "param") << ", missing "
       << (options.missing == Missing::kZero ? "zero" : "error") << ", layout "
       << name(options.layout) << ", bucket_bytes " << *options.bucket_bytes << ", shard_over "
       << (options.shard_over == ShardOver::kMesh ? "mesh" : "shard");
  return text.str();
}

void expect_no_differing_bit(std::span<const RankResult> ranks, const RandomJob& job,
                             std::size_t index) {
  SCOPED_TRACE(described(job, index));
  const RandomStep& step = job.steps[index];
  for (std::size_t p = 0; p < job.parameters.size(); ++p) {
    const ParameterSpec& spec = job.parameters[p];
    ReferenceStep reference = reference_step(step.what, job.options, job.shape, p);
    reference.schedule = step.schedules[p % step.schedules.size()];
    const Values want = reference_result(reference, step.what.gradients[p]);
    for (int replica = 0; replica < job.shape.replicate; ++replica) {
      std::ostringstream label;
      label << spec.name << " of " << spec.group << ", shape " << to_string(spec.shape)
            << ", gradient " << name(spec.dtype) << ", on the wires "
            << name(reference.reduce_dtype) << " and " << name(reference.replica_dtype)
            << ", replica " << replica;
      expect_same_bits(joined(ranks, job.shape.shard, replica, p, element_count(spec.shape),
                              job.options.shard_over),
                       want, label.str());
    }
  }
}

// One world of threads runs all jobs on a mesh.
void check_jobs(MeshShape shape, const std::vector<RandomJob>& jobs) {
  using StepResults = std::vector<std::vector<RankResult>>;  // [step][rank]
  std::vector<StepResults> results(
      jobs.size(),
      StepResults(kStepsPerSeed, std::vector<RankResult>(static_cast<std::size_t>(shape.size()))));
  run_mesh(shape, [&](const Mesh& mesh) {
    const auto rank = static_cast<std::size_t>(mesh.rank());
    for (std::size_t j = 0; j < jobs.size(); ++j) {
      Reducer reducer(mesh, jobs[j].options);
      register_all(reducer, jobs[j].steps.front().what);
      for (std::size_t i = 0; i < jobs[j].steps.size(); ++i) {
        results[j][i][rank] =
            run_random_step(reducer, jobs[j].steps[i], mesh.rank(), jobs[j].delivery);
      }
    }
  });
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    for (std::size_t i = 0; i < jobs[j].steps.size(); ++i) {
      expect_no_differing_bit(results[j][i], jobs[j], i);
    }
  }
}

TEST(RandomSteps, TwoHundredWithNoDifferingBit) {
  std::map<std::pair<int, int>, std::vector<RandomJob>> jobs_of_mesh;
  for (std::uint64_t seed = 0; seed < kSeedCount; ++seed) {
    RandomJob job = random_job(seed);
    jobs_of_mesh[{job.shape.replicate, job.shape.shard}].push_back(std::move(job));
  }
  for (const auto& [shape, jobs] : jobs_of_mesh) {
    check_jobs({.replicate = shape.first, .shard = shape.second}, jobs);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace hsdp
