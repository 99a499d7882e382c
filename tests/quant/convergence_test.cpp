// Why there is error feedback: with it a four-bit hop converges to the solution, without it to
// another point.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "tests/support/loco_reference.h"

namespace hsdp::quant {
namespace {

using test::LocoReference;
using Floats = LocoReference::Floats;

// The rules, which the hop follows to the bit (loco_hop_bits_test.cpp), for one parameter.
LocoReference rules_of(const LocoOptions& options, int replicas, std::int64_t count) {
  return {options, replicas, {{.name = "x", .cuts = {0, count}}}};
}

// Replica n has f_n(x) = |x - b_n|^2 / 2. The b_n lie three times as far apart as their mean lies
// from zero, so the gradients do not vanish at the solution. Returns |x - mean b| / |mean b|.
double distance_from_solution(const LocoOptions& options, int step_count, bool decays) {
  constexpr int kReplicas = 4;
  constexpr std::int64_t kCount = 1024;
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
  LocoReference rules = rules_of(options, kReplicas, kCount);
  std::vector<double> x(kCount);
  std::vector<std::vector<Floats>> gradients(kReplicas, {Floats(kCount)});
  for (int step = 0; step < step_count; ++step) {
    for (std::size_t replica = 0; replica < kReplicas; ++replica) {
      for (std::size_t i = 0; i < x.size(); ++i) {
        gradients[replica][0][i] = static_cast<float>(x[i]) - targets[replica][i];
      }
    }
    const Floats mean = rules.reduce(gradients, kReplicas)[0];
    rules.end_step(true);
    const double rate = decays ? 0.1 / (1 + 0.005 * step) : 0.1;
    for (std::size_t i = 0; i < x.size(); ++i) x[i] -= rate * mean[i];
  }
  double missed = 0.0;
  double all = 0.0;
  for (std::size_t i = 0; i < solution.size(); ++i) {
    missed += (x[i] - solution[i]) * (x[i] - solution[i]);
    all += solution[i] * solution[i];
  }
  return std::sqrt(missed / all);
}

TEST(Convergence, IsFiveTimesNearerAndTwentyTimesWithADecayingRate) {
  const LocoOptions loco{.group_size = 128, .scale_dtype = Dtype::kF32, .reset_T = 0};
  LocoOptions plain = loco;
  plain.error_feedback = false;
  EXPECT_LE(5 * distance_from_solution(loco, 500, false),
            distance_from_solution(plain, 500, false));
  EXPECT_LE(20 * distance_from_solution(loco, 2000, true),
            distance_from_solution(plain, 2000, true));
}

// After some steps: what was given, what arrived of it, and the errors that remain.
struct Account {
  std::vector<double> given;
  std::vector<double> arrived;
  std::vector<double> owed;
};

struct Course {
  LocoOptions options;
  int replicas = 2;
  std::int64_t count = 64;
  int steps = 0;
};

// give(rank, gradient): the gradient of a replica's next step.
Account account_of(const Course& run, const std::function<void(int rank, Floats& gradient)>& give) {
  const auto count = static_cast<std::size_t>(run.count);
  Account account{.given = std::vector<double>(count), .arrived = std::vector<double>(count)};
  LocoReference rules = rules_of(run.options, run.replicas, run.count);
  std::vector<std::vector<Floats>> given(static_cast<std::size_t>(run.replicas), {Floats(count)});
  for (int step = 0; step < run.steps; ++step) {
    for (std::size_t replica = 0; replica < given.size(); ++replica) {
      Floats& own = given[replica][0];
      give(static_cast<int>(replica), own);
      for (std::size_t i = 0; i < count; ++i) account.given[i] += own[i];
    }
    const Floats arrived = rules.reduce(given, 1.0F)[0];
    rules.end_step(true);
    for (std::size_t i = 0; i < count; ++i) account.arrived[i] += arrived[i];
  }
  account.owed = rules.owed(0);
  return account;
}

TEST(Account, WhatArrivedAndWhatIsOwedIsWhatWasGiven) {
  for (const double beta : {0.0, 0.5, 0.8, 0.95}) {
    std::vector<std::mt19937> random{std::mt19937(1), std::mt19937(2), std::mt19937(3)};
    const Course run{{.err_beta = beta, .reset_T = 0, .error_dtype = Dtype::kF32}, 3, 436, 50};
    const Account account = account_of(run, [&](int rank, Floats& given) {
      std::normal_distribution<float> normal;
      for (float& value : given) value = normal(random[static_cast<std::size_t>(rank)]);
    });
    for (std::size_t i = 0; i < account.given.size(); ++i) {
      EXPECT_NEAR(account.arrived[i] + account.owed[i], account.given[i], 1e-3) << beta;
    }
  }
}

// One large element, and small ones that vanish beside it in four bits: they arrive all the same.
TEST(Account, SmallValuesBesideALargeOneArrive) {
  for (const float small : {1e-3F, 2e-3F, 5e-3F, 0.01F, 0.03F, 0.05F}) {
    const auto give = [&](int, Floats& given) {
      std::ranges::fill(given, small);
      given[0] = 1.0F;
    };
    const Account plain = account_of({{.error_feedback = false}, 2, 64, 3}, give);
    for (std::size_t i = 1; i < 64; ++i) EXPECT_EQ(plain.arrived[i], 0.0);
    const Account loco = account_of({{.reset_T = 0}, 2, 64, 1500}, give);
    for (std::size_t i = 1; i < 64; ++i) {
      EXPECT_NEAR((loco.arrived[i] + loco.owed[i]) / loco.given[i], 1.0, 1e-3) << small;
      EXPECT_GT(loco.arrived[i], 0.7 * loco.given[i]) << small;
    }
  }
}

// int8 errors lose what is far smaller than the rest of their group; stochastic rounding keeps it
// on average.
TEST(Account, StochasticRoundingKeepsTheSmallestErrors) {
  const auto kept = [](bool stochastic) {
    const Account account = account_of(
        {{.reset_T = 0, .stochastic_error = stochastic}, 2, 64, 1000}, [](int, Floats& given) {
          for (std::size_t i = 0; i < given.size(); ++i) {
            const auto place = static_cast<float>(i) / 63.0F;
            given[i] = std::pow(10.0F, 4.0F * place - 4.0F);
          }
        });
    double arrived = 0.0;
    double given = 0.0;
    for (std::size_t i = 0; i < 16; ++i) {
      arrived += account.arrived[i] + account.owed[i];
      given += account.given[i];
    }
    return arrived / given;
  };
  EXPECT_LT(kept(false), 0.6);
  EXPECT_NEAR(kept(true), 1.0, 0.05);
}

}  // namespace
}  // namespace hsdp::quant
