#include "hsdp/snapshot/block_difference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "hsdp/snapshot/difference.h"

namespace hsdp {
namespace {

// Computes the difference by its definition, element by element.
template <class T>
BlockDifference reference(const std::vector<T>& a, const std::vector<T>& b, UlpSpacing spacing) {
  BlockDifference r;
  long double squared_difference = 0;
  long double squared_a = 0;
  long double squared_b = 0;
  long double product = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = static_cast<double>(a[i]);
    const double y = static_cast<double>(b[i]);
    const double difference = std::abs(x - y);
    const double larger = std::max(std::abs(x), std::abs(y));
    const int exponent =
        larger == 0 ? spacing.min_exponent : std::max(std::ilogb(larger), spacing.min_exponent);
    r.max_difference = std::max(r.max_difference, difference);
    r.max_a = std::max(r.max_a, std::abs(x));
    r.max_b = std::max(r.max_b, std::abs(y));
    r.max_ulp = std::max(r.max_ulp, std::ldexp(difference, spacing.mantissa_bits - exponent));
    squared_difference += static_cast<long double>(difference) * difference;
    squared_a += static_cast<long double>(x) * x;
    squared_b += static_cast<long double>(y) * y;
    product += static_cast<long double>(x) * y;
  }
  r.sum_squared_difference = static_cast<double>(squared_difference);
  r.sum_squared_a = static_cast<double>(squared_a);
  r.sum_squared_b = static_cast<double>(squared_b);
  r.sum_product = static_cast<double>(product);
  return r;
}

void expect_close(double got, double expected, double scale) {
  EXPECT_NEAR(got, expected, scale * 1e-13);
}

template <class T>
class BlockDifferenceOf : public ::testing::Test {};
using Elements = ::testing::Types<float, double>;
TYPED_TEST_SUITE(BlockDifferenceOf, Elements);

TYPED_TEST(BlockDifferenceOf, EqualsItsDefinition) {
  std::mt19937_64 engine(3);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> exponents(-140, 120);
  for (const std::size_t count : std::vector<std::size_t>{0, 1, 2, 3, 7, 8, 9, 31, 1000, 4099}) {
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      std::vector<TypeParam> a(count);
      std::vector<TypeParam> b(count);
      for (std::size_t i = 0; i < count; ++i) {
        const double x = std::ldexp(normal(engine), exponents(engine));
        a[i] = static_cast<TypeParam>(i % 5 == 0 ? 0 : x);
        b[i] = static_cast<TypeParam>(x * (1 + 1e-3 * normal(engine)));
      }
      const UlpSpacing spacing = ulp_spacing(dtype);
      const BlockDifference got = block_difference(a.data(), b.data(), count, spacing);
      const BlockDifference expected = reference(a, b, spacing);
      EXPECT_EQ(got.max_difference, expected.max_difference);
      EXPECT_EQ(got.max_a, expected.max_a);
      EXPECT_EQ(got.max_b, expected.max_b);
      EXPECT_EQ(got.max_ulp, expected.max_ulp) << count;
      expect_close(got.sum_squared_difference, expected.sum_squared_difference,
                   expected.sum_squared_difference);
      expect_close(got.sum_squared_a, expected.sum_squared_a, expected.sum_squared_a);
      expect_close(got.sum_squared_b, expected.sum_squared_b, expected.sum_squared_b);
      expect_close(got.sum_product, expected.sum_product, expected.sum_squared_b);
    }
  }
}

TYPED_TEST(BlockDifferenceOf, TellsWhatIsNotFinite) {
  for (const TypeParam bad :
       {std::numeric_limits<TypeParam>::infinity(), std::numeric_limits<TypeParam>::quiet_NaN()}) {
    for (std::size_t at = 0; at < 19; ++at) {
      std::vector<TypeParam> a(19, 1);
      const std::vector<TypeParam> b(19, 1);
      a[at] = bad;
      EXPECT_FALSE(std::isfinite(block_difference(a.data(), b.data(), 19, {}).sum_squared_a));
      EXPECT_FALSE(std::isfinite(block_difference(b.data(), a.data(), 19, {}).sum_squared_b));
    }
  }
}

TEST(UlpSpacing, CountsStepsOfTheDtype) {
  const auto ulp = [](float a, float b, Dtype dtype) {
    return block_difference(&a, &b, 1, ulp_spacing(dtype)).max_ulp;
  };
  EXPECT_EQ(ulp(1, std::nextafter(1.0F, 2.0F), Dtype::kF32), 1);
  EXPECT_EQ(ulp(1, 1 + 0x1p-7F, Dtype::kBf16), 1);
  EXPECT_EQ(ulp(1, 1 + 0x1p-8F, Dtype::kBf16), 0.5);
  EXPECT_EQ(ulp(-1, -1 - 3 * 0x1p-10F, Dtype::kF16), 3);
  // Subnormals of f16 are 2^-24 apart, those of f32 2^-149.
  EXPECT_EQ(ulp(0, 0x1p-24F, Dtype::kF16), 1);
  EXPECT_EQ(ulp(0, 0x1p-149F, Dtype::kF32), 1);
  EXPECT_EQ(ulp(0, 0, Dtype::kF32), 0);
}

}  // namespace
}  // namespace hsdp
