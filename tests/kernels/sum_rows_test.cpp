#include "hsdp/kernels/sum_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <tuple>

#include "caller_environment.h"
#include "hsdp/error.h"
#include "kernel_test_data.h"

namespace hsdp::kernels {
namespace {

// Everything one call needs, laid out at random alignments.
struct Call {
  Call(const SumSpec& spec_, std::size_t row_count, std::size_t out_count, bool has_add,
       std::int64_t count_, std::mt19937& random)
      : spec(spec_), count(count_) {
    const bool together = random() % 2 == 0;  // outputs that can stream
    for (std::size_t r = 0; r < row_count; ++r) {
      rows.emplace_back(spec.row_dtype, count, random() % 40);
      rows.back().fill(random);
    }
    for (std::size_t o = 0; o < out_count; ++o) {
      outs.emplace_back(spec.out_dtype, count, together ? 3 : random() % 40);
      expected.emplace_back(spec.out_dtype, count, 0);
    }
    if (has_add) {
      add = std::make_unique<Row>(Dtype::kF32, count, random() % 40);
      add->fill(random);
    }
    streaming_stores = random() % 2 == 0;
  }

  // Returns the flag.
  std::uint32_t run(void (*kernel)(const SumRows&), std::vector<Row>& into) {
    std::vector<const void*> sources;
    std::vector<void*> targets;
    for (Row& row : rows) sources.push_back(row.data());
    for (Row& out : into) targets.push_back(out.data());
    std::atomic<std::uint32_t> nonfinite = 0;
    SumRows args;
    args.spec = spec;
    args.rows = sources;
    args.add = add ? reinterpret_cast<const float*>(add->data()) : nullptr;
    args.outs = targets;
    args.count = count;
    args.nonfinite = &nonfinite;
    args.streaming_stores = streaming_stores;
    kernel(args);
    return nonfinite;
  }

  [[nodiscard]] std::string check() {
    const std::uint32_t flag = run(sum_rows_reference, expected);
    if (run(sum_rows, outs) != flag) return "the flags differ";
    for (std::size_t o = 0; o < outs.size(); ++o) {
      if (!outs[o].guards_hold()) return "it wrote outside an output";
      if (const std::string found = outs[o].difference(expected[o]); !found.empty()) return found;
    }
    return "";
  }

  SumSpec spec;
  std::int64_t count;
  std::vector<Row> rows, outs, expected;
  std::unique_ptr<Row> add;
  bool streaming_stores = false;
};

std::string describe(const SumSpec& spec) {
  return std::string(name(spec.row_dtype)) + " rows, wire " + std::string(name(spec.wire_dtype)) +
         " 2^-" + std::to_string(spec.send_exponent) + ", sum 2^" +
         std::to_string(spec.sum_exponent) + ", total " + std::string(name(spec.total_dtype)) +
         " 2^-" + std::to_string(spec.total_exponent) + ", result 2^" +
         std::to_string(spec.result_exponent) + " / " + std::to_string(spec.divisor) + " to " +
         std::string(name(spec.out_dtype));
}

// Every combination of what changes the arithmetic.
std::vector<SumSpec> all_specs() {
  std::vector<SumSpec> specs;
  for (const Dtype row : kGradientDtypes) {
    for (const Dtype wire : kGradientDtypes) {
      if (row != Dtype::kF32 && wire != row) continue;
      for (const int send : {0, 3}) {
        for (const Dtype total : kGradientDtypes) {
          for (const int exponent : {0, 4}) {
            for (const float divisor : {1.0F, 8.0F, 3.0F, 0.7F}) {
              for (const Dtype out : kGradientDtypes) {
                specs.push_back(
                    {row, wire, send, exponent / 2, total, exponent, exponent + 1, divisor, out});
                specs.push_back({row, wire, send, 0, total, exponent, 0, divisor, out});
              }
            }
          }
        }
      }
    }
  }
  return specs;
}

using SumRowsOn = OnTarget;

TEST_P(SumRowsOn, EqualsTheReferenceForEverySpec) {
  std::mt19937 random(1);
  constexpr std::size_t kRowCounts[] = {1, 2, 3, 4, 5, 8, 13};
  for (const SumSpec& spec : all_specs()) {
    for (const bool has_add : {false, true}) {
      const std::size_t rows = kRowCounts[random() % std::size(kRowCounts)];
      Call call(spec, rows, 1 + random() % 3, has_add, random() % 200, random);
      ASSERT_EQ(call.check(), "") << describe(spec) << ", " << rows << " rows, add " << has_add;
    }
  }
}

TEST_P(SumRowsOn, EqualsTheReferenceForEveryCountAndAlignment) {
  std::mt19937 random(2);
  for (const Dtype row : kGradientDtypes) {
    for (const Dtype out : kGradientDtypes) {
      SumSpec spec;
      spec.row_dtype = row;
      spec.out_dtype = out;
      spec.divisor = 3.0F;
      for (std::int64_t count = 0; count <= 290; ++count) {
        Call call(spec, 2, 1 + random() % 2, count % 2 == 0, count, random);
        ASSERT_EQ(call.check(), "") << describe(spec) << ", " << count << " elements";
      }
    }
  }
}

TEST_P(SumRowsOn, EqualsTheReferenceOnLongRows) {
  std::mt19937 random(3);
  for (const Dtype row : kGradientDtypes) {
    SumSpec spec;
    spec.row_dtype = row;
    spec.out_dtype = row;
    spec.divisor = 4.0F;
    Call call(spec, 4, 4, true, 30011, random);
    ASSERT_EQ(call.check(), "") << describe(spec);
  }
}

TEST_P(SumRowsOn, WorksInPlace) {
  std::mt19937 random(4);
  for (const Dtype dtype : kGradientDtypes) {
    SumSpec spec;
    spec.row_dtype = dtype;
    spec.out_dtype = dtype;
    spec.divisor = 3.0F;
    Call call(spec, 3, 3, false, 1001, random);
    call.run(sum_rows_reference, call.expected);
    call.run(sum_rows, call.rows);
    for (std::size_t i = 0; i < 3; ++i) ASSERT_EQ(call.rows[i].difference(call.expected[i]), "");
  }
}

TEST_P(SumRowsOn, AddsIntoTheCarryInPlace) {
  std::mt19937 random(5);
  SumSpec spec;
  spec.row_dtype = Dtype::kBf16;
  Call call(spec, 4, 1, true, 1001, random);
  call.run(sum_rows_reference, call.expected);
  std::vector<Row> carry{*call.add};
  call.add = std::make_unique<Row>(Dtype::kF32, 0, 0);
  std::vector<const void*> sources;
  for (Row& row : call.rows) sources.push_back(row.data());
  void* target = carry[0].data();
  SumRows args;
  args.spec = spec;
  args.rows = sources;
  args.add = static_cast<const float*>(target);
  args.outs = std::span(&target, 1);
  args.count = 1001;
  sum_rows(args);
  EXPECT_EQ(carry[0].difference(call.expected[0]), "");
}

TEST_P(SumRowsOn, IgnoresTheCallersFloatingPointEnvironment) {
  std::mt19937 random(6);
  for (const Dtype row : kGradientDtypes) {
    for (const Dtype wire : kGradientDtypes) {
      if (row != Dtype::kF32 && wire != row) continue;
      const SumSpec spec{row, wire, 1, 0, Dtype::kF16, 2, 2, 3.0F, Dtype::kF32};
      Call call(spec, 3, 1, true, 500, random);
      call.run(sum_rows_reference, call.expected);
      std::vector<Row> reference{Row(Dtype::kF32, 500, 0)};
      {
        const SpoiltEnvironment environment;
        call.run(sum_rows, call.outs);
        EXPECT_TRUE(environment.unchanged());
        call.run(sum_rows_reference, reference);
        EXPECT_TRUE(environment.unchanged());
      }
      ASSERT_EQ(call.outs[0].difference(call.expected[0]), "") << describe(spec);
      ASSERT_EQ(reference[0].difference(call.expected[0]), "") << describe(spec);
    }
  }
}

template <class T>
void expect_plain_sum(Dtype dtype, const std::vector<T>& first, const std::vector<T>& second,
                      const std::vector<T>& expected, bool finite) {
  const void* const rows[] = {first.data(), second.data()};
  std::vector<T> result(first.size());
  void* const outs[] = {result.data()};
  std::atomic<std::uint32_t> nonfinite = 0;
  SumRows args;
  args.spec.row_dtype = args.spec.out_dtype = dtype;
  args.rows = rows;
  args.outs = outs;
  args.count = static_cast<std::int64_t>(first.size());
  args.nonfinite = &nonfinite;
  for (const auto kernel : {sum_rows, sum_rows_reference}) {
    nonfinite = 0;
    kernel(args);
    EXPECT_EQ(result, expected);
    EXPECT_EQ(nonfinite == 0, finite);
  }
}

TEST_P(SumRowsOn, SumsDoublesAndWrapsIntegers) {
  std::vector<double> ones(1300, 1.0);
  std::vector<double> small(1300, 0x1p-40);
  const std::vector<double> sums(1300, 1.0 + 0x1p-40);
  expect_plain_sum(Dtype::kF64, ones, small, sums, true);
  expect_plain_sum<double>(Dtype::kF64, {1e308}, {1e308}, {std::numeric_limits<double>::infinity()},
                           false);
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  expect_plain_sum<std::int64_t>(Dtype::kI64, {kLargest, -5, 3}, {1, 5, 4},
                                 {std::numeric_limits<std::int64_t>::min(), 0, 7}, true);
}

float sum_one(const SumSpec& spec, std::vector<float> values, std::uint32_t* flag = nullptr) {
  constexpr std::int64_t kCount = 70;  // in every path: blocks, single vectors, the tail
  std::vector<std::vector<float>> rows;
  std::vector<const void*> sources;
  for (const float value : values) rows.emplace_back(kCount, value);
  for (const std::vector<float>& row : rows) sources.push_back(row.data());
  std::vector<float> result(kCount);
  void* out = result.data();
  std::atomic<std::uint32_t> nonfinite = 0;
  SumRows args;
  args.spec = spec;
  args.rows = sources;
  args.outs = std::span(&out, 1);
  args.count = kCount;
  args.nonfinite = &nonfinite;
  sum_rows(args);
  if (flag != nullptr) *flag = nonfinite;
  for (const float x : result) EXPECT_TRUE(x == result[0] || (x != x && result[0] != result[0]));
  return result[0];
}

TEST_P(SumRowsOn, GivesTheNumbersOfTheContract) {
  SumSpec spec;
  EXPECT_EQ(sum_one(spec, {1.0F, 0x1p-24F, 0x1p-24F}), 1.0F);  // ascending rank, each sum rounded
  EXPECT_EQ(sum_one(spec, {0x1p-24F, 0x1p-24F, 1.0F}), 1.0F + 0x1p-23F);
  spec.divisor = 3.0F;
  EXPECT_EQ(sum_one(spec, {1.0F}), 1.0F / 3.0F);
  spec.divisor = 1.0F;
  spec.wire_dtype = Dtype::kBf16;
  EXPECT_EQ(sum_one(spec, {1.0F + 0x1p-8F, 1.0F}), 2.0F);  // the row is rounded, the sum is not
  EXPECT_EQ(sum_one(spec, {256.0F, 1.0F}), 257.0F);
  spec.wire_dtype = Dtype::kF16;
  spec.send_exponent = 4;
  spec.sum_exponent = 4;
  EXPECT_EQ(sum_one(spec, {409600.0F, 409600.0F}), 819200.0F);
  spec = {};
  spec.total_dtype = Dtype::kF16;
  spec.total_exponent = 1;
  spec.result_exponent = 1;
  EXPECT_EQ(sum_one(spec, {2048.0F, 2.0F}), 2052.0F - 4.0F + 2.0F);  // 1025 fits f16
  EXPECT_EQ(sum_one(spec, {4096.0F, 2.0F}), 4096.0F);                // 2049 is a tie, to even
}

TEST_P(SumRowsOn, FlagsWhatIsNotFinite) {
  std::uint32_t flag = 0;
  const float largest = std::numeric_limits<float>::max();
  SumSpec spec;
  sum_one(spec, {largest, -largest}, &flag);
  EXPECT_EQ(flag, 0U);
  sum_one(spec, {largest, largest}, &flag);
  EXPECT_EQ(flag, 1U);
  sum_one(spec, {std::numeric_limits<float>::quiet_NaN()}, &flag);
  EXPECT_EQ(flag, 1U);
  sum_one(spec, {-std::numeric_limits<float>::infinity()}, &flag);
  EXPECT_EQ(flag, 1U);
  spec.total_dtype = Dtype::kF16;
  sum_one(spec, {65519.0F}, &flag);
  EXPECT_EQ(flag, 0U);
  sum_one(spec, {65520.0F}, &flag);
  EXPECT_EQ(flag, 1U);
}

TEST_P(SumRowsOn, FlagsWhatTheOutputDtypeCannotHold) {
  const struct {
    Dtype dtype;
    float fits, overflows;
  } rows[] = {{Dtype::kF16, 65519.0F, 65520.0F},
              {Dtype::kBf16, std::bit_cast<float>(0x7f7f7fffU), std::bit_cast<float>(0x7f7f8000U)}};
  for (const auto& row : rows) {
    for (const bool overflow : {false, true}) {
      for (const std::size_t place : {0U, 69U}) {
        std::vector<float> values(70, 1.0F);
        values[place] = overflow ? -row.overflows : row.fits;
        const void* source = values.data();
        std::vector<std::uint16_t> result(70);
        void* out = result.data();
        std::atomic<std::uint32_t> nonfinite = 0;
        SumRows args;
        args.spec.out_dtype = row.dtype;
        args.rows = std::span(&source, 1);
        args.outs = std::span(&out, 1);
        args.count = 70;
        args.nonfinite = &nonfinite;
        sum_rows(args);
        EXPECT_EQ(nonfinite == 1, overflow) << name(row.dtype) << " at " << place;
      }
    }
  }
}

TEST_P(SumRowsOn, RefusesWhatItCannotDo) {
  float value = 1.0F;
  const void* row = &value;
  void* out = &value;
  SumRows args;
  args.outs = std::span(&out, 1);
  args.count = 1;
  EXPECT_THROW(sum_rows(args), UsageError);  // no rows
  args.rows = std::span(&row, 1);
  EXPECT_NO_THROW(sum_rows(args));
  SumRows wrong = args;
  wrong.spec.row_dtype = Dtype::kU8;
  EXPECT_THROW(sum_rows(wrong), UsageError);
  wrong = args;
  wrong.spec.out_dtype = Dtype::kF64;
  EXPECT_THROW(sum_rows(wrong), UsageError);
  wrong = args;
  wrong.spec.row_dtype = wrong.spec.out_dtype = Dtype::kI64;
  wrong.spec.divisor = 2.0F;
  EXPECT_THROW(sum_rows(wrong), UsageError);
  wrong = args;
  wrong.spec.sum_exponent = 127;
  EXPECT_THROW(sum_rows(wrong), UsageError);
  wrong = args;
  wrong.count = -1;
  EXPECT_THROW(sum_rows(wrong), UsageError);
}

INSTANTIATE_TEST_SUITE_P(Targets, SumRowsOn, ::testing::ValuesIn(simd_targets()), target_name);

}  // namespace
}  // namespace hsdp::kernels
