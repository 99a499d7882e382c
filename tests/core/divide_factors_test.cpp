#include "hsdp/divide_factors.h"

#include <gtest/gtest.h>

#include <bit>

namespace hsdp {
namespace {

TEST(DivideFactors, AreTheProductOfTheHopsThatRan) {
  EXPECT_EQ(gradient_divide_factor(8, 4, false), 8.0);
  EXPECT_EQ(gradient_divide_factor(8, 4, true), 32.0);
  EXPECT_EQ(gradient_divide_factor(1, 4, false), 1.0);
  EXPECT_EQ(gradient_divide_factor(1, 4, true), 4.0);
  EXPECT_EQ(gradient_divide_factor(7, 1, true), 7.0);
  EXPECT_EQ(gradient_divide_factor(1, 1, true), 1.0);
}

TEST(DivideFactors, GiveWayToAnExplicitOne) {
  EXPECT_EQ(gradient_divide_factor(8, 4, false, 3.5), 3.5);
  EXPECT_EQ(gradient_divide_factor(8, 4, true, 1.0), 1.0);
}

TEST(DivideFactors, RoundTheirProductOnce) {
  EXPECT_EQ(fp32_divisor(32.0, 1.0), 32.0F);
  // 2^24 + 1 halved and doubled stays exact in fp64, and is rounded to fp32 at the end only.
  EXPECT_EQ(fp32_divisor((0x1p24 + 1.0) * 3.0, 0.5), static_cast<float>((0x1p24 + 1.0) * 1.5));
  EXPECT_EQ(fp32_divisor(3.0, 65536.0), 196608.0F);
}

TEST(HeadroomExponent, IsTheLogarithmRoundedUp) {
  for (std::int64_t n = 1; n <= 70000; ++n) {
    const int exponent = headroom_exponent(n);
    ASSERT_GE(std::int64_t{1} << exponent, n);
    ASSERT_TRUE(exponent == 0 || (std::int64_t{1} << (exponent - 1)) < n) << n;
  }
  EXPECT_EQ(headroom_exponent((std::int64_t{1} << 40) + 1), 41);
}

}  // namespace
}  // namespace hsdp
