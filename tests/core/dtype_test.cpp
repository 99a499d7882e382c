#include "hsdp/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "hsdp/error.h"

namespace hsdp {
namespace {

// Describes a format by numbers alone, independently of the code under test.
struct Format {
  int mantissa_bits;
  int exponent_bits;
  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};
constexpr Format kF16Format{10, 5};
constexpr Format kBf16Format{7, 8};

double value_of(std::uint16_t bits, Format format) {
  const int exponent = (bits >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1);
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << format.exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) {
    return sign * std::ldexp(mantissa, 1 - format.bias() - format.mantissa_bits);
  }
  return sign * std::ldexp(mantissa + (1 << format.mantissa_bits),
                           exponent - format.bias() - format.mantissa_bits);
}

struct F16Case {
  using Type = F16;
  static constexpr Format kFormat = kF16Format;
  static constexpr std::uint16_t kInfinity = 0x7c00;
  static F16 encode(float x) { return to_f16(x); }
};
struct Bf16Case {
  using Type = Bf16;
  static constexpr Format kFormat = kBf16Format;
  static constexpr std::uint16_t kInfinity = 0x7f80;
  static Bf16 encode(float x) { return to_bf16(x); }
};

template <class Case>
class SixteenBit : public ::testing::Test {};
using Cases = ::testing::Types<F16Case, Bf16Case>;
TYPED_TEST_SUITE(SixteenBit, Cases);

TYPED_TEST(SixteenBit, DecodesAndEncodesEveryValue) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const typename TypeParam::Type x{static_cast<std::uint16_t>(bits)};
    const float value = to_float(x);
    const double expected = value_of(x.bits, TypeParam::kFormat);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(to_float(TypeParam::encode(value)))) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(value), expected) << bits;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000U) != 0) << bits;
      ASSERT_EQ(TypeParam::encode(value).bits, bits);
    }
  }
}

// Rounding is monotone between two neighbours, so testing the values next to each border suffices.
TYPED_TEST(SixteenBit, RoundsToNearestEvenAtEveryBorder) {
  const auto encode = [](double x, std::uint32_t sign) {
    const float value = static_cast<float>(x);
    return TypeParam::encode(sign != 0 ? -value : value).bits;
  };
  for (const std::uint32_t sign : {0U, 0x8000U}) {
    for (std::uint32_t low = 0; low < TypeParam::kInfinity; ++low) {
      const double below = value_of(static_cast<std::uint16_t>(low), TypeParam::kFormat);
      const double unit =
          below - (low == 0 ? -value_of(1, TypeParam::kFormat)
                            : value_of(static_cast<std::uint16_t>(low - 1), TypeParam::kFormat));
      const bool last = low + 1U == TypeParam::kInfinity;
      const double above =
          last ? below + unit : value_of(static_cast<std::uint16_t>(low + 1), TypeParam::kFormat);
      const auto middle = static_cast<float>((below + above) / 2);
      if (std::isinf(middle)) continue;
      ASSERT_EQ(static_cast<double>(middle), (below + above) / 2);
      const float infinity = std::numeric_limits<float>::infinity();
      const std::uint32_t even = (low & 1U) == 0 ? low : low + 1;
      ASSERT_EQ(encode(middle, sign), sign | even) << low;
      ASSERT_EQ(encode(std::nextafter(middle, 0.0F), sign), sign | low) << low;
      ASSERT_EQ(encode(std::nextafter(middle, infinity), sign), sign | (low + 1)) << low;
      ASSERT_EQ(encode(std::nextafter(static_cast<float>(below), infinity), sign), sign | low);
    }
  }
}

TYPED_TEST(SixteenBit, OverflowsToInfinityAndKeepsEveryNan) {
  EXPECT_EQ(TypeParam::encode(std::numeric_limits<float>::max()).bits, TypeParam::kInfinity);
  for (std::uint32_t bit = 0; bit < 23; ++bit) {
    for (const std::uint32_t sign : {0U, 0x80000000U}) {
      const auto nan = std::bit_cast<float>(sign | 0x7f800000U | (1U << bit));
      EXPECT_TRUE(std::isnan(to_float(TypeParam::encode(nan)))) << bit;
    }
  }
}

TEST(Dtype, ConvertsAtCompileTime) {
  static_assert(to_bf16(1.0F).bits == 0x3f80);
  static_assert(to_f16(1.0F).bits == 0x3c00);
  static_assert(to_float(F16{0x0001}) == 0x1p-24F);
  static_assert(to_float(Bf16{0x0001}) == 0x1p-133F);
}

TEST(Dtype, NamesAndSizes) {
  const struct {
    Dtype dtype;
    const char* name;
    const char* long_name;
    std::size_t bytes;
    bool gradient;
  } rows[] = {{Dtype::kF32, "f32", "float32", 4, true}, {Dtype::kBf16, "bf16", "bfloat16", 2, true},
              {Dtype::kF16, "f16", "float16", 2, true}, {Dtype::kF64, "f64", "float64", 8, true},
              {Dtype::kI64, "i64", "int64", 8, false},  {Dtype::kU8, "u8", "uint8", 1, false}};
  for (const auto& row : rows) {
    EXPECT_EQ(name(row.dtype), row.name);
    EXPECT_EQ(size_bytes(row.dtype), row.bytes);
    EXPECT_EQ(parse_dtype(row.name), row.dtype);
    EXPECT_EQ(parse_dtype(row.long_name), row.dtype);
    EXPECT_EQ(is_gradient_dtype(row.dtype), row.gradient);
  }
  for (const char* wrong : {"", "F32", "f8", "float", "bf16 "}) {
    EXPECT_THROW(static_cast<void>(parse_dtype(wrong)), UsageError) << wrong;
  }
}

}  // namespace
}  // namespace hsdp
