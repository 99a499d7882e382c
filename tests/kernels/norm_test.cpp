#include "hsdp/kernels/norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "caller_environment.h"
#include "hsdp/error.h"
#include "hsdp/kernels/clip.h"
#include "kernel_test_data.h"

namespace hsdp::kernels {
namespace {

using NormOn = OnTarget;

ConstTensorView view_of(Row& row) {
  return {row.data(), static_cast<std::int64_t>(row.count()), row.dtype()};
}

// Finite values of very different sizes, so that another order of additions changes the sum.
void fill_finite(Row& row, std::mt19937& random) {
  for (std::size_t i = 0; i < row.count(); ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    const auto value =
        std::bit_cast<float>((bits & 0x807fffffU) | ((107U + (bits >> 8) % 30U) << 23));
    encode(value, row.data(), static_cast<std::int64_t>(i), row.dtype());
  }
}

// Adds in the order that norm.h defines: in chunks of sixteen lanes, then the sums of the chunks.
double sum_in_chunks(const std::vector<double>& values) {
  std::vector<double> sums;
  for (std::size_t begin = 0; begin < values.size(); begin += 1024) {
    double lanes[16] = {};
    for (std::size_t i = begin; i < std::min(begin + 1024, values.size()); ++i) {
      lanes[i % 16] += values[i];
    }
    for (const int half : {8, 4, 2, 1}) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    sums.push_back(lanes[0]);
  }
  if (sums.empty()) return 0.0;
  return sums.size() == 1 ? sums[0] : sum_in_chunks(sums);
}

TEST_P(NormOn, SquaredNormSumsChunksAndTheirSums) {
  std::mt19937 random(1);
  const auto check = [&](Dtype dtype, std::int64_t count) {
    Row row(dtype, count, random() % 40);
    fill_finite(row, random);
    std::vector<double> squares(row.count());
    for (std::size_t i = 0; i < row.count(); ++i) {
      squares[i] = static_cast<double>(row.at(i)) * row.at(i);
    }
    const double expected = sum_in_chunks(squares);
    ASSERT_EQ(squared_norm_reference(view_of(row)), expected) << name(dtype) << " " << count;
    ASSERT_EQ(squared_norm(view_of(row)), expected) << name(dtype) << " " << count;
  };
  for (const Dtype dtype : kGradientDtypes) {
    for (std::int64_t count = 0; count < 200; ++count) check(dtype, count);
  }
  constexpr std::int64_t kMillion = 1024 * 1024;
  for (const std::int64_t count :
       std::vector<std::int64_t>{1023, 1024, 1025, 16384, 300001, kMillion - 1, kMillion,
                                 kMillion + 1, 2 * kMillion + 5000}) {
    check(Dtype::kF32, count);
  }
}

TEST_P(NormOn, SquaredNormEqualsTheReferenceOnHostileValues) {
  std::mt19937 random(2);
  for (const Dtype dtype : kGradientDtypes) {
    for (int repeat = 0; repeat < 100; ++repeat) {
      Row row(dtype, static_cast<std::int64_t>(random() % 40), random() % 40);
      row.fill(random);
      const double expected = squared_norm_reference(view_of(row));
      double got = 0.0;
      run_in_environment(true, [&] { got = squared_norm(view_of(row)); });
      ASSERT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)));
    }
  }
}

TEST_P(NormOn, SquaredNormKeepsTheSmallest) {
  Row row(Dtype::kF32, 33, 0);
  for (std::int64_t i = 0; i < 33; ++i) encode(0x1p-149F, row.data(), i, Dtype::kF32);
  EXPECT_EQ(squared_norm(view_of(row)), 33 * 0x1p-298);
}

TEST_P(NormOn, FindsOneNonfiniteElementAnywhere) {
  std::mt19937 random(3);
  for (const Dtype dtype : kGradientDtypes) {
    for (const std::int64_t count : {1, 7, 64, 130, 255, 40000}) {
      Row row(dtype, count, random() % 40);
      // The largest finite value everywhere.
      const float largest = dtype == Dtype::kF16    ? 65504.0F
                            : dtype == Dtype::kBf16 ? std::bit_cast<float>(0x7f7f0000U)
                                                    : std::numeric_limits<float>::max();
      for (std::int64_t i = 0; i < count; ++i) encode(-largest, row.data(), i, dtype);
      ASSERT_FALSE(has_nonfinite(view_of(row)));
      ASSERT_FALSE(has_nonfinite_reference(view_of(row)));
      for (int repeat = 0; repeat < 20; ++repeat) {
        const auto place = static_cast<std::int64_t>(random()) % count;
        const float bad = repeat % 2 == 0 ? std::numeric_limits<float>::quiet_NaN()
                                          : -std::numeric_limits<float>::infinity();
        encode(bad, row.data(), place, dtype);
        ASSERT_TRUE(has_nonfinite(view_of(row))) << place << " of " << count;
        ASSERT_TRUE(has_nonfinite_reference(view_of(row)));
        encode(largest, row.data(), place, dtype);
      }
    }
  }
  EXPECT_FALSE(has_nonfinite({nullptr, 0, Dtype::kF32}));
}

// The last value is lost unless the sum is in order. The caller's environment must change no bit.
TEST_P(NormOn, ClipsByTheOrderedSum) {
  const std::vector<double> squares{0.1, 0x1p60, -0x1p60, 0.7, 1e-3, 3.0, 0.9, 11.0, 0x1p-52};
  double want = 0.0;
  for (const double square : squares) want += square;
  const Stream stream = Stream::inline_host();
  for (const double max_norm : {0.5, 1e30}) {
    Row values(Dtype::kF32, 1000, 3);
    std::mt19937 random(4);
    fill_finite(values, random);
    encode(0x1p-149F, values.data(), 7, Dtype::kF32);
    Row before = values;
    double sum = 0.0;
    double norm = 0.0;
    double factor = 0.0;
    float narrow = 0.0F;
    run_in_environment(true, [&] {
      sum_in_order(squares.data(), std::ssize(squares), &sum, stream);
      clip_factor({squares.data(), std::ssize(squares), max_norm, 1e-6, &norm, &factor, &narrow},
                  stream);
      scale_by({values.data(), 1000, Dtype::kF32}, &factor, stream);
    });
    EXPECT_EQ(sum, want);
    EXPECT_EQ(norm, std::sqrt(want));
    const double clip = max_norm / (norm + 1e-6);
    EXPECT_EQ(factor, clip < 1.0 ? clip : 1.0);
    EXPECT_EQ(narrow, static_cast<float>(factor));
    for (std::size_t i = 0; i < 1000; ++i) ASSERT_EQ(values.at(i), before.at(i) * narrow) << i;
  }
}

TEST(Indicate, IsOneForWhatIsNotZero) {
  for (const std::uint32_t word : {0U, 1U, 0x80000000U, 0x3f800000U, 0x40400000U}) {
    float out = -1.0F;
    indicate(&word, &out, Stream::inline_host());
    EXPECT_EQ(out, (word & 0x7fffffffU) != 0 ? 1.0F : 0.0F) << word;
  }
}

TEST_P(NormOn, RefusesOtherDtypes) {
  const ConstTensorView view{nullptr, 0, Dtype::kI64};
  EXPECT_THROW(static_cast<void>(squared_norm(view)), UsageError);
  EXPECT_THROW(static_cast<void>(has_nonfinite(view)), UsageError);
}

INSTANTIATE_TEST_SUITE_P(Targets, NormOn, ::testing::ValuesIn(simd_targets()), target_name);

}  // namespace
}  // namespace hsdp::kernels
