#include "hsdp/kernels/sum_rows.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <utility>

#include "caller_environment.h"
#include "hsdp/error.h"
#include "kernel_test_data.h"

namespace hsdp::kernels {
namespace {

// All arrays of one call, at random alignments.
struct Call {
  Call(const SumSpec& spec_, std::size_t row_count, std::size_t out_count, bool has_add,
       std::int64_t count_, std::mt19937& random)
      : spec(spec_), count(count_) {
    const bool together = random() % 2 == 0;  // equally aligned outputs allow streaming stores
    for (std::size_t r = 0; r < row_count; ++r) {
      rows.emplace_back(spec.row_dtype, count, random() % 40).fill(random);
    }
    for (std::size_t o = 0; o < out_count; ++o) {
      outs.emplace_back(spec.out_dtype, count, together ? 3 : random() % 40);
      expected.emplace_back(spec.out_dtype, count, 0);
    }
    if (has_add) add.emplace_back(Dtype::kF32, count, random() % 40).fill(random);
    streaming_stores = random() % 2 == 0;
    spoils_the_kernel = random() % 2 == 0;
  }

  // Returns the nonfinite flag.
  std::uint32_t run(void (*kernel)(const SumRows&), std::vector<Row>& into, bool spoils = false) {
    std::vector<const void*> sources;
    std::vector<void*> targets;
    for (Row& row : rows) sources.push_back(row.data());
    for (Row& out : into) targets.push_back(out.data());
    std::atomic<std::uint32_t> nonfinite = 0;
    const SumRows args{.spec = spec,
                       .rows = sources,
                       .add = add.empty() ? nullptr : reinterpret_cast<const float*>(add[0].data()),
                       .outs = targets,
                       .count = count,
                       .nonfinite = &nonfinite,
                       .streaming_stores = streaming_stores};
    run_in_environment(spoils, [&] { kernel(args); });
    return nonfinite;
  }

  // Compares the kernel with the reference; one of them runs in a spoilt environment.
  [[nodiscard]] std::string check() {
    const std::uint32_t flag = run(sum_rows_reference, expected, !spoils_the_kernel);
    if (run(sum_rows, outs, spoils_the_kernel) != flag) return "the flags differ";
    for (std::size_t o = 0; o < outs.size(); ++o) {
      if (!outs[o].guards_hold()) return "it wrote outside an output";
      if (const std::string found = outs[o].difference(expected[o]); !found.empty()) return found;
    }
    return "";
  }

  SumSpec spec;
  std::int64_t count;
  std::vector<Row> rows, outs, expected;
  std::vector<Row> add;  // one or none
  bool streaming_stores = false;
  bool spoils_the_kernel = false;
};

std::string describe(const SumSpec& spec) {
  return std::string(name(spec.row_dtype)) + " rows, wire " + std::string(name(spec.wire_dtype)) +
         " 2^-" + std::to_string(spec.send_exponent) + ", sum 2^" +
         std::to_string(spec.sum_exponent) + ", total " + std::string(name(spec.total_dtype)) +
         " 2^-" + std::to_string(spec.total_exponent) + ", result 2^" +
         std::to_string(spec.result_exponent) + " / " + std::to_string(spec.divisor) + " to " +
         std::string(name(spec.out_dtype));
}

// Every combination of the fields that change the arithmetic.
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
      const SumSpec spec{.row_dtype = row, .divisor = 3.0F, .out_dtype = out};
      for (std::int64_t next = 0; next <= 291; ++next) {
        const std::int64_t count = next == 291 ? 30011 : next;
        Call call(spec, 2 + random() % 3, 1 + random() % 4, next % 2 == 0, count, random);
        ASSERT_EQ(call.check(), "") << describe(spec) << ", " << count << " elements";
      }
    }
  }
}

TEST_P(SumRowsOn, WorksInPlace) {
  std::mt19937 random(4);
  for (const Dtype dtype : kGradientDtypes) {
    Call call({.row_dtype = dtype, .divisor = 3.0F, .out_dtype = dtype}, 3, 3, false, 1001, random);
    call.run(sum_rows_reference, call.expected);
    call.run(sum_rows, call.rows);
    for (std::size_t i = 0; i < 3; ++i) ASSERT_EQ(call.rows[i].difference(call.expected[i]), "");
  }
}

TEST_P(SumRowsOn, AddsIntoTheCarryInPlace) {
  std::mt19937 random(5);
  Call call({.row_dtype = Dtype::kBf16}, 4, 1, true, 1001, random);
  call.run(sum_rows_reference, call.expected);
  call.run(sum_rows, call.add);
  EXPECT_EQ(call.add[0].difference(call.expected[0]), "");
}

template <class T>
void expect_plain_sum(Dtype dtype, const std::vector<T>& first, const std::vector<T>& second,
                      const std::vector<T>& expected, bool finite) {
  const void* const rows[] = {first.data(), second.data()};
  std::vector<T> result(first.size());
  void* const outs[] = {result.data()};
  for (const auto kernel : {sum_rows, sum_rows_reference}) {
    std::atomic<std::uint32_t> nonfinite = 0;
    const SumRows args{.spec = {.row_dtype = dtype, .out_dtype = dtype},
                       .rows = rows,
                       .outs = outs,
                       .count = std::ssize(first),
                       .nonfinite = &nonfinite};
    run_in_environment(true, [&] { kernel(args); });
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

struct Sum {
  float value = 0.0F;
  bool flagged = false;
};

// Sums rows of ones in which row r has values[r] at `place`. Of the 70 elements some are in blocks,
// some in single vectors and some in the tail.
Sum sum_at(std::size_t place, const SumSpec& spec, const std::vector<float>& values) {
  std::vector<std::vector<float>> rows(values.size(), std::vector<float>(70, 1.0F));
  std::vector<const void*> sources;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    rows[r][place] = values[r];
    sources.push_back(rows[r].data());
  }
  Row result(spec.out_dtype, 70, 0);
  void* const out = result.data();
  std::atomic<std::uint32_t> nonfinite = 0;
  sum_rows({.spec = spec,
            .rows = sources,
            .outs = std::span(&out, 1),
            .count = 70,
            .nonfinite = &nonfinite});
  return {.value = result.at(place), .flagged = nonfinite == 1};
}

TEST_P(SumRowsOn, GivesTheNumbersOfTheContract) {
  const SumSpec scaled{.wire_dtype = Dtype::kF16, .send_exponent = 4, .sum_exponent = 4};
  const SumSpec halved{.total_dtype = Dtype::kF16, .total_exponent = 1, .result_exponent = 1};
  const struct {
    SumSpec spec;
    std::vector<float> values;
    float want;
  } rows[] = {
      {{}, {1.0F, 0x1p-24F, 0x1p-24F}, 1.0F},  // ascending rank, each sum rounded
      {{}, {0x1p-24F, 0x1p-24F, 1.0F}, 1.0F + 0x1p-23F},
      {{.divisor = 3.0F}, {1.0F}, 1.0F / 3.0F},
      // The row is rounded, the sum is not.
      {{.wire_dtype = Dtype::kBf16}, {1.0F + 0x1p-8F, 1.0F}, 2.0F},
      {{.wire_dtype = Dtype::kBf16}, {256.0F, 1.0F}, 257.0F},
      {scaled, {409600.0F, 409600.0F}, 819200.0F},
      {halved, {2048.0F, 2.0F}, 2050.0F},  // 1025 fits f16
      {halved, {4096.0F, 2.0F}, 4096.0F},  // 2049 is a tie, to even
  };
  for (const auto& row : rows) {
    for (std::size_t place = 0; place < 70; ++place) {
      ASSERT_EQ(sum_at(place, row.spec, row.values).value, row.want)
          << describe(row.spec) << ", at " << place;
    }
  }
}

TEST_P(SumRowsOn, FlagsWhatIsNotFinite) {
  using Limits = std::numeric_limits<float>;
  constexpr float kLargest = Limits::max();
  const struct {
    SumSpec spec;
    std::vector<float> values;
    bool flagged;
  } rows[] = {
      {{}, {kLargest, -kLargest}, false},
      {{}, {kLargest, kLargest}, true},
      {{}, {Limits::quiet_NaN()}, true},
      {{}, {-Limits::infinity()}, true},
      {{.total_dtype = Dtype::kF16}, {65519.0F}, false},
      {{.total_dtype = Dtype::kF16}, {65520.0F}, true},
      {{.out_dtype = Dtype::kF16}, {65519.0F}, false},
      {{.out_dtype = Dtype::kF16}, {-65520.0F}, true},
      {{.out_dtype = Dtype::kBf16}, {std::bit_cast<float>(0x7f7f7fffU)}, false},
      {{.out_dtype = Dtype::kBf16}, {-std::bit_cast<float>(0x7f7f8000U)}, true},
  };
  for (const auto& row : rows) {
    for (std::size_t place = 0; place < 70; ++place) {
      ASSERT_EQ(sum_at(place, row.spec, row.values).flagged, row.flagged)
          << describe(row.spec) << ", " << row.values[0] << " at " << place;
    }
  }
}

TEST_P(SumRowsOn, RefusesWhatItCannotDo) {
  float value = 1.0F;
  const void* row = &value;
  void* out = &value;
  const SumRows good{.rows = std::span(&row, 1), .outs = std::span(&out, 1), .count = 1};
  EXPECT_NO_THROW(sum_rows(good));
  const std::pair<const char*, std::function<void(SumRows&)>> faults[] = {
      {"no rows", [](SumRows& args) { args.rows = {}; }},
      {"rows of u8", [](SumRows& args) { args.spec.row_dtype = Dtype::kU8; }},
      {"f64 from f32", [](SumRows& args) { args.spec.out_dtype = Dtype::kF64; }},
      {"divided integers",
       [](SumRows& args) {
         args.spec = {.row_dtype = Dtype::kI64, .divisor = 2.0F, .out_dtype = Dtype::kI64};
       }},
      {"scaled doubles",
       [](SumRows& args) {
         args.spec = {.row_dtype = Dtype::kF64, .sum_exponent = 1, .out_dtype = Dtype::kF64};
       }},
      {"exponent", [](SumRows& args) { args.spec.sum_exponent = 127; }},
      {"count", [](SumRows& args) { args.count = -1; }},
  };
  for (const auto& [label, spoil] : faults) {
    SumRows args = good;
    spoil(args);
    EXPECT_THROW(sum_rows(args), UsageError) << label;
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, SumRowsOn, ::testing::ValuesIn(simd_targets()), target_name);

}  // namespace
}  // namespace hsdp::kernels
