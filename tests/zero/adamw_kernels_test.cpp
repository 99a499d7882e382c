// The arithmetic of AdamW: its bits on every SIMD target, its distance from fp64, and what a
// skipped update leaves untouched. tests/gpu/adamw_checks.cpp has the CUDA kernels.
#include "zero/adamw_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tests/kernels/caller_environment.h"
#include "tests/kernels/kernel_test_data.h"

namespace hsdp::zero {
namespace {

using kernels::Row;

class AdamWOn : public kernels::OnTarget {};

// The formula of adamw.h, implemented a second time.
AdamWNumbers numbers_of(const AdamWOptions& options, int step, float grad_factor) {
  double power1 = 1.0;
  double power2 = 1.0;
  for (int t = 0; t < step; ++t) {
    power1 *= options.beta1;
    power2 *= options.beta2;
  }
  AdamWNumbers numbers;
  numbers.grad_factor = grad_factor;
  numbers.take1 = static_cast<float>(1.0 - options.beta1);
  numbers.beta2 = static_cast<float>(options.beta2);
  numbers.take2 = static_cast<float>(1.0 - options.beta2);
  numbers.root = static_cast<float>(std::sqrt(1.0 - power2));
  numbers.epsilon = static_cast<float>(options.epsilon);
  numbers.keep = static_cast<float>(1.0 - options.lr * options.weight_decay);
  numbers.rate = static_cast<float>(options.lr / (1.0 - power1));
  return numbers;
}

// A slice whose four arrays have different alignments.
struct Memory {
  Memory(std::int64_t count, std::mt19937& random)
      : parameter(Dtype::kF32, count, random() % 16),
        gradient(Dtype::kF32, count, random() % 16),
        first(Dtype::kF32, count, random() % 16),
        second(Dtype::kF32, count, random() % 16) {
    for (Row* const row : {&parameter, &gradient, &first, &second}) row->fill(random);
  }

  [[nodiscard]] AdamWSlice slice() {
    const auto at = [](Row& row) { return reinterpret_cast<float*>(row.data()); };
    return {at(parameter), at(gradient), at(first), at(second),
            static_cast<std::int64_t>(parameter.count())};
  }
  // By the formula.
  void update(const AdamWNumbers& n) {
    const AdamWSlice all = slice();
    for (std::int64_t i = 0; i < all.count; ++i) {
      const float g = all.gradient[i] * n.grad_factor;
      float& m = all.first[i];
      float& v = all.second[i];
      float& p = all.parameter[i];
      m = m + (g - m) * n.take1;
      v = v * n.beta2 + (g * g) * n.take2;
      p = p * n.keep - n.rate * (m / (std::sqrt(v) / n.root + n.epsilon));
    }
  }
  void expect(Memory& want, std::int64_t count) {
    ASSERT_EQ(parameter.difference(want.parameter), "") << "parameter, " << count;
    ASSERT_EQ(gradient.difference(want.gradient), "") << "gradient, " << count;
    ASSERT_EQ(first.difference(want.first), "") << "first moment, " << count;
    ASSERT_EQ(second.difference(want.second), "") << "second moment, " << count;
    ASSERT_TRUE(parameter.guards_hold() && first.guards_hold() && second.guards_hold()) << count;
  }

  Row parameter;
  Row gradient;
  Row first;
  Row second;
};

// Difficult values, in every tail. The caller's floating-point environment changes no bit.
TEST_P(AdamWOn, HasTheBitsOfTheFormula) {
  std::mt19937 random(1);
  const Stream stream = Stream::inline_host();
  std::vector<std::int64_t> counts{100'003};
  for (std::int64_t count = 0; count <= 70; ++count) counts.insert(counts.end(), 6, count);
  for (const std::int64_t count : counts) {
    const float factor = random() % 2 == 0 ? 1.0F : 0.37F;
    Memory got(count, random);
    Memory want = got;
    Memory scalar = got;
    AdamWClock clock;
    kernels::run_in_environment(true, [&] {
      adamw_tick({.options = {}, .grad_factor = &factor, .found_inf = nullptr, .clock = &clock},
                 stream);
      const AdamWSlice slice = got.slice();
      adamw_update({&slice, 1}, &clock, stream);
      adamw_reference(scalar.slice(), clock.numbers);
    });
    want.update(numbers_of({}, 1, factor));
    got.expect(want, count);
    scalar.expect(want, count);
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AdamWOn, ::testing::ValuesIn(kernels::simd_targets()),
                         kernels::target_name);

void expect_numbers(const AdamWNumbers& got, const AdamWNumbers& want, int step) {
  EXPECT_EQ(got.grad_factor, want.grad_factor) << step;
  EXPECT_EQ(got.take1, want.take1) << step;
  EXPECT_EQ(got.beta2, want.beta2) << step;
  EXPECT_EQ(got.take2, want.take2) << step;
  EXPECT_EQ(got.root, want.root) << step;
  EXPECT_EQ(got.epsilon, want.epsilon) << step;
  EXPECT_EQ(got.keep, want.keep) << step;
  EXPECT_EQ(got.rate, want.rate) << step;
  EXPECT_EQ(got.skip, 0U) << step;
}

// With betas of zero there is no bias correction.
TEST(AdamWTick, CountsWhatIsNotSkipped) {
  const Stream stream = Stream::inline_host();
  const float factor = 0.25F;
  for (const AdamWOptions& options :
       {AdamWOptions{.lr = 0.02, .beta1 = 0.8, .beta2 = 0.95, .weight_decay = 0.3},
        AdamWOptions{.lr = 0.5, .beta1 = 0.0, .beta2 = 0.0}}) {
    AdamWClock clock;
    int steps = 0;
    for (int call = 1; call <= 60; ++call) {
      const float found_inf = call % 3 == 1 ? 1.0F : 0.0F;
      adamw_tick({.options = options,
                  .grad_factor = &factor,
                  .found_inf = call % 3 == 0 ? nullptr : &found_inf,
                  .clock = &clock},
                 stream);
      if (call % 3 != 1) {
        ++steps;
        expect_numbers(clock.numbers, numbers_of(options, steps, factor), steps);
      } else {
        EXPECT_EQ(clock.numbers.skip, 1U) << call;
      }
      EXPECT_EQ(clock.steps, steps) << call;
    }
  }
}

// adamw.h states this bound.
TEST(AdamWUpdate, StaysWithinTheBoundOfFp64) {
  constexpr double kU = 0x1p-24;
  constexpr std::int64_t kCount = 2000;
  const AdamWOptions options{.lr = 0.01, .weight_decay = 0.1};
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  Memory got(kCount, random);
  const AdamWSlice slice = got.slice();
  for (std::int64_t i = 0; i < kCount; ++i) {
    slice.parameter[i] = normal(random);
    slice.first[i] = slice.second[i] = 0.0F;
  }
  AdamWClock clock;
  for (int step = 1; step <= 50; ++step) {
    for (std::int64_t i = 0; i < kCount; ++i) {
      kernels::encode(std::ldexp(normal(random), static_cast<int>(i % 21) - 10),
                      got.gradient.data(), i, Dtype::kF32);
    }
    Memory before = got;
    adamw_tick({.options = options, .grad_factor = {}, .found_inf = {}, .clock = &clock},
               Stream::inline_host());
    adamw_update({&slice, 1}, &clock, Stream::inline_host());
    const double rate = options.lr / (1.0 - std::pow(options.beta1, step));
    const double root = std::sqrt(1.0 - std::pow(options.beta2, step));
    for (std::int64_t i = 0; i < kCount; ++i) {
      const AdamWSlice old = before.slice();
      const double g = old.gradient[i];
      const double m0 = old.first[i];
      const double m = m0 + (g - m0) * (1.0 - options.beta1);
      const double v = old.second[i] * options.beta2 + g * g * (1.0 - options.beta2);
      const double d = std::sqrt(v) / root + options.epsilon;
      const double p0 = old.parameter[i];
      const double p = p0 * (1.0 - options.lr * options.weight_decay) - rate * m / d;
      const double bound =
          kU * (2 * std::abs(p0) + std::abs(p) +
                rate / d * (3 * std::abs(g - m0) * (1.0 - options.beta1) + 10 * std::abs(m)));
      ASSERT_LE(std::abs(slice.parameter[i] - p), 1.0001 * bound) << i << " in step " << step;
    }
  }
}

}  // namespace
}  // namespace hsdp::zero
