// What error feedback is for: with it a hop of four bits goes to the solution, without it beside
// it.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "quant/loco_hop.h"
#include "tests/comm/rank_threads.h"

namespace hsdp::quant {
namespace {

constexpr int kReplicas = 4;
constexpr std::int64_t kCount = 1024;
constexpr int kSteps = 4000;

using Floats = std::vector<float>;

// Replica n has f_n(x) = |x - b_n|^2 / 2, and the b_n lie three times as far apart as their mean
// from zero: gradients that do not vanish at the solution. Returns |x - mean b| / |mean b|.
double distance_from_solution(const LocoOptions& options, bool decays) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  std::vector<Floats> targets(kReplicas, Floats(kCount));
  std::vector<double> solution(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    const double base = normal(random);
    for (Floats& target : targets) {
      target[i] = static_cast<float>(base + 3 * normal(random));
      solution[i] += target[i] / static_cast<double>(kReplicas);
    }
  }
  HopPlan plan;
  plan.parameters = {{"x", {kCount}}};
  plan.ranges = {{{0, 0, kCount, 0}}};
  plan.wires = {Dtype::kF32};
  plan.replicate_size = kReplicas;
  double distance = 0.0;
  test::run_world({.size = kReplicas}, [&](Communicator& world) {
    LocoHop hop(options);
    hop.prepare(plan);
    hop.bind(world, world.split(0, world.rank()));
    const Floats& target = targets[static_cast<std::size_t>(world.rank())];
    std::vector<double> x(kCount);
    Floats gradient(kCount);
    std::atomic<std::uint32_t> nonfinite = 0;
    Stream stream = Stream::inline_host();
    for (int step = 0; step < kSteps; ++step) {
      for (std::size_t i = 0; i < x.size(); ++i) {
        gradient[i] = static_cast<float>(x[i]) - target[i];
      }
      HopBucket bucket;
      bucket.data = {gradient.data(), kCount, Dtype::kF32, {}};
      bucket.arithmetic.mean_divisor = kReplicas;
      bucket.nonfinite = &nonfinite;
      hop.reduce(bucket, stream).wait();
      hop.end_step({step, StepOutcome::kClean, ""});
      const double rate = decays ? 0.1 / (1 + 0.005 * step) : 0.1;
      for (std::size_t i = 0; i < x.size(); ++i) x[i] -= rate * gradient[i];
    }
    hop.bind({}, {});
    if (world.rank() != 0) return;
    double missed = 0.0;
    double all = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      missed += (x[i] - solution[i]) * (x[i] - solution[i]);
      all += solution[i] * solution[i];
    }
    distance = std::sqrt(missed / all);
  });
  return distance;
}

TEST(Convergence, IsFiveTimesNearerAndTwentyTimesWithADecayingRate) {
  const LocoOptions loco{.group_size = 128, .scale_dtype = Dtype::kF32, .reset_T = 0};
  LocoOptions plain = loco;
  plain.error_feedback = false;
  EXPECT_LE(5 * distance_from_solution(loco, false), distance_from_solution(plain, false));
  EXPECT_LE(20 * distance_from_solution(loco, true), distance_from_solution(plain, true));
}

}  // namespace
}  // namespace hsdp::quant
