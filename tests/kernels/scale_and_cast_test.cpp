#include "hsdp/kernels/scale_and_cast.h"

#include <gtest/gtest.h>

#include "caller_environment.h"
#include "hsdp/error.h"
#include "kernel_test_data.h"

namespace hsdp::kernels {
namespace {

using ScaleAndCastOn = OnTarget;

std::uint32_t scale(void (*kernel)(const ScaleAndCast&), ScaleAndCast args, Row& in, Row& out,
                    bool spoils = false) {
  std::atomic<std::uint32_t> nonfinite = 0;
  args.in = in.data();
  args.in_dtype = in.dtype();
  args.out = out.data();
  args.out_dtype = out.dtype();
  args.count = static_cast<std::int64_t>(in.count());
  args.nonfinite = &nonfinite;
  run_in_environment(spoils, [&] { kernel(args); });
  return nonfinite;
}

TEST_P(ScaleAndCastOn, EqualsTheReference) {
  std::mt19937 random(1);
  for (const Dtype from : kGradientDtypes) {
    for (const Dtype to : kGradientDtypes) {
      for (const int exponent : {0, 7, -20}) {
        for (const float divisor : {1.0F, 32.0F, 3.0F, 1e-40F}) {
          for (const float multiplier : {1.0F, 0.3F}) {
            for (int repeat = 0; repeat < 4; ++repeat) {
              const auto count = static_cast<std::int64_t>(random() % 300);
              Row in(from, count, random() % 40);
              Row out(to, count, random() % 40);
              Row expected(to, count, 0);
              in.fill(random);
              const ScaleAndCast args{.exponent = exponent,
                                      .divisor = divisor,
                                      .multiplier = multiplier,
                                      .streaming_stores = repeat % 2 == 1};
              const bool spoils = random() % 2 == 0;  // the kernel, else the reference
              const std::uint32_t flag =
                  scale(scale_and_cast_reference, args, in, expected, !spoils);
              ASSERT_EQ(scale(scale_and_cast, args, in, out, spoils), flag);
              ASSERT_TRUE(out.guards_hold());
              ASSERT_EQ(out.difference(expected), "")
                  << name(from) << " to " << name(to) << " 2^" << exponent << " / " << divisor
                  << " * " << multiplier;
            }
          }
        }
      }
    }
  }
}

TEST_P(ScaleAndCastOn, WorksInPlace) {
  std::mt19937 random(2);
  for (const Dtype dtype : kGradientDtypes) {
    Row in(dtype, 777, 5);
    Row expected(dtype, 777, 0);
    in.fill(random);
    scale(scale_and_cast_reference, {.divisor = 7.0F, .multiplier = 0.1F}, in, expected);
    scale(scale_and_cast, {.divisor = 7.0F, .multiplier = 0.1F}, in, in);
    EXPECT_EQ(in.difference(expected), "");
  }
}

TEST_P(ScaleAndCastOn, ScalesThenDividesThenMultiplies) {
  Row in(Dtype::kF16, 70, 0);
  Row out(Dtype::kF32, 70, 0);
  for (std::int64_t i = 0; i < 70; ++i) encode(5.0F, in.data(), i, Dtype::kF16);
  const ScaleAndCast args{.exponent = 3, .divisor = 3.0F, .multiplier = 0.7F};
  EXPECT_EQ(scale(scale_and_cast, args, in, out), 0U);
  for (std::size_t i = 0; i < 70; ++i) ASSERT_EQ(out.at(i), 40.0F / 3.0F * 0.7F);
}

TEST_P(ScaleAndCastOn, RefusesWhatItCannotDo) {
  EXPECT_THROW(scale_and_cast({.in_dtype = Dtype::kI64}), UsageError);
  EXPECT_THROW(scale_and_cast({.out_dtype = Dtype::kU8}), UsageError);
  EXPECT_THROW(scale_and_cast({.count = -1}), UsageError);
  EXPECT_THROW(scale_and_cast({.exponent = -127}), UsageError);
}

INSTANTIATE_TEST_SUITE_P(Targets, ScaleAndCastOn, ::testing::ValuesIn(simd_targets()), target_name);

}  // namespace
}  // namespace hsdp::kernels
