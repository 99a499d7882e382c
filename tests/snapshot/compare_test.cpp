#include "hsdp/compare.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "hsdp/error.h"
#include "tests/snapshot/compare_fixture.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace hsdp {
namespace {

using namespace hsdp::testing;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST_F(Compare, PutsTheWorstParameterFirstAndNamesItsElement) {
  auto gradients = some_gradients();
  const Snapshot b = write("b", gradients, mesh_info(2, 2));
  gradients[0].data[7] += 0.5F;         // (2, 1) of (5, 3)
  gradients[6].data[123457] += 100.0F;  // of (401, 499)
  const Snapshot a = write("a", gradients, mesh_info(1, 3, "dim0"));
  const Comparison comparison = compare_snapshots(a, b);
  EXPECT_EQ(comparison.verdict, Verdict::kDifferent);
  ASSERT_EQ(comparison.parameters.size(), gradients.size());
  EXPECT_EQ(comparison.parameters[0].name, "big");
  EXPECT_EQ(comparison.parameters[0].worst.index, 123457);
  EXPECT_EQ(static_cast<float>(comparison.parameters[0].worst.a), gradients[6].data[123457]);
  EXPECT_EQ(comparison.parameters[1].name, "layer.0.weight");
  EXPECT_EQ(comparison.parameters[1].worst.index, 7);
  EXPECT_EQ(comparison.parameters[2].verdict, Verdict::kSame);
}

TEST_F(Compare, MeasuresWhatItSays) {
  const ParameterDifference d = difference({3, 4, 0, -8}, {3, 4.5F, 0, -8.5F});
  EXPECT_EQ(d.max_absolute, 0.5);
  EXPECT_EQ(d.max_relative, 0.5 / 8.5);
  EXPECT_DOUBLE_EQ(d.relative_l2, std::sqrt(0.5 / (9 + 20.25 + 72.25)));
  EXPECT_DOUBLE_EQ(d.cosine, (9 + 18 + 68) / std::sqrt(89 * 101.5));
  EXPECT_EQ(d.max_ulp, 0.5 / 0x1p-21);
  EXPECT_EQ(d.worst.index, 1);
  EXPECT_EQ(d.worst.b, 4.5);
}

#if defined(__SSE2__)
TEST_F(Compare, CountsSubnormalsWhateverTheCallerHasSet) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040U);  // flush to zero, denormals are zero
  const ParameterDifference d = difference({1e-40F, 1e-41F}, {1e-40F, 3e-41F});
  EXPECT_EQ(_mm_getcsr() & 0x8040U, 0x8040U) << "the caller's own is put back";
  _mm_setcsr(before);
  EXPECT_EQ(d.verdict, Verdict::kDifferent);
  EXPECT_EQ(d.max_absolute, static_cast<double>(3e-41F) - static_cast<double>(1e-41F));
}
#endif

TEST_F(Compare, TakesTheLimitOfTheCoarsestWire) {
  const std::vector<float> ones(64, 1.0F);
  const auto verdict = [&](float factor, Dtype wire) {
    return difference(std::vector<float>(64, factor), ones, {}, wire).verdict;
  };
  EXPECT_EQ(verdict(1 + 0x1p-20F, Dtype::kF32), Verdict::kSame);
  EXPECT_EQ(verdict(1 + 0x1p-19F, Dtype::kF32), Verdict::kDifferent);
  EXPECT_EQ(verdict(1 + 0x1p-9F, Dtype::kF16), Verdict::kSame);
  EXPECT_EQ(verdict(1 + 0x1p-8F, Dtype::kF16), Verdict::kDifferent);
  EXPECT_EQ(verdict(1 + 0x1p-6F, Dtype::kBf16), Verdict::kSame);
  EXPECT_EQ(verdict(1 + 0x1p-5F, Dtype::kBf16), Verdict::kDifferent);
}

TEST_F(Compare, CountsAWireOnlyWhereItsHopRan) {
  struct Case {
    int replicate;
    int shard;
    Dtype reduce;
    std::optional<Dtype> replica;
    Dtype coarsest;
  };
  constexpr Dtype kF32 = Dtype::kF32;
  constexpr Dtype kF16 = Dtype::kF16;
  constexpr Dtype kBf16 = Dtype::kBf16;
  const std::vector<Case> cases{{2, 1, kF32, kBf16, kBf16}, {1, 2, kF32, kBf16, kF32},
                                {2, 1, kBf16, kF32, kF32},  {2, 2, kBf16, kF32, kBf16},
                                {2, 1, kBf16, {}, kBf16},   {1, 1, kBf16, kF16, kF32},
                                {2, 2, kF16, kBf16, kBf16}};
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    SnapshotInfo info = mesh_info(c.replicate, c.shard);
    info.replica_dtype = c.replica;
    const Snapshot run =
        write("run" + std::to_string(i), {{"w", {4}, {1, 2, 3, 4}}}, info, c.reduce);
    EXPECT_EQ(compare_snapshots(run, run).parameters[0].coarsest, c.coarsest) << i;
  }
}

// Each of the two measures alone can be the one that is exceeded.
TEST_F(Compare, NeedsBothMeasuresWithinTheLimit) {
  std::vector<float> a(1 << 16, 1.0F);
  const std::vector<float> b = a;
  a[5] += 0x1p-16F;
  const ParameterDifference spike = difference(a, b);
  EXPECT_LT(spike.relative_l2, spike.limit);
  EXPECT_GT(spike.max_relative, spike.limit);
  EXPECT_EQ(spike.verdict, Verdict::kDifferent);
  std::vector<float> c(1 << 16, 0x1p-22F);
  std::vector<float> d = c;
  c[0] = d[0] = 0x1p-2F;
  for (std::size_t i = 1; i < c.size(); ++i) c[i] *= 0.5F;
  const ParameterDifference spread = difference(c, d);
  EXPECT_LE(spread.max_relative, spread.limit);
  EXPECT_GT(spread.relative_l2, spread.limit);
  EXPECT_EQ(spread.verdict, Verdict::kDifferent);
}

TEST_F(Compare, ZerosAreTheSameAndZeroAgainstSomethingIsNot) {
  const ParameterDifference zeros = difference({0, -0.0F}, {0, 0});
  EXPECT_EQ(zeros.verdict, Verdict::kSame);
  EXPECT_EQ(zeros.relative_l2, 0);
  EXPECT_EQ(zeros.cosine, 1);
  const ParameterDifference something = difference({1e-30F, 0}, {0, 0});
  EXPECT_EQ(something.verdict, Verdict::kDifferent);
  EXPECT_EQ(something.relative_l2, std::numeric_limits<double>::infinity());
}

TEST_F(Compare, JudgesByTolerancesWhenTheyAreGiven) {
  CompareOptions options;
  options.rtol = 0.25;
  EXPECT_EQ(difference({1.25F, -5}, {1, -4}, options).verdict, Verdict::kSame);
  const ParameterDifference d = difference({1.25F, -5.5F, 10}, {1, -4, 9}, options);
  EXPECT_EQ(d.verdict, Verdict::kDifferent);
  EXPECT_EQ(d.failing, 1);
  EXPECT_EQ(d.worst.index, 1);
  // b is what rtol scales.
  EXPECT_EQ(difference({4}, {5}, options).verdict, Verdict::kSame);
  EXPECT_EQ(difference({5.5F}, {4}, options).verdict, Verdict::kDifferent);
  options.atol = 0.5;
  EXPECT_EQ(difference({5.5F}, {4}, options).verdict, Verdict::kSame);
  CompareOptions absolute;
  absolute.atol = 0;
  EXPECT_EQ(difference({1}, {1}, absolute).verdict, Verdict::kSame);
  EXPECT_EQ(difference({1}, {1.0000001F}, absolute).verdict, Verdict::kDifferent);
}

// The worst element is one that fails, even where another differs more.
TEST_F(Compare, NamesAnElementThatFails) {
  CompareOptions options;
  options.rtol = 0.1;
  const ParameterDifference d = difference({1000, 1}, {1050, 2}, options);
  EXPECT_EQ(d.failing, 1);
  EXPECT_EQ(d.worst.index, 1);
}

TEST_F(Compare, CountsUlps) {
  CompareOptions options;
  options.ulp = 2;
  const float one_up = std::nextafter(1.0F, 2.0F);
  const float two_up = std::nextafter(one_up, 2.0F);
  const float three_up = std::nextafter(two_up, 2.0F);
  EXPECT_EQ(difference({two_up}, {1}, options).verdict, Verdict::kSame);
  const ParameterDifference d = difference({1, three_up, three_up}, {1, 1, 1}, options);
  EXPECT_EQ(d.verdict, Verdict::kDifferent);
  EXPECT_EQ(d.max_ulp, 3);
  EXPECT_EQ(d.failing, 2);
  EXPECT_EQ(d.worst.index, 1);
  EXPECT_EQ(difference({1 + 0x1p-6F}, {1}, options, Dtype::kBf16).verdict, Verdict::kSame);
}

TEST_F(Compare, BitwiseTellsZerosAndNanApart) {
  CompareOptions options;
  options.bitwise = true;
  EXPECT_EQ(difference({0, kNan}, {0, kNan}, options).verdict, Verdict::kSame);
  const ParameterDifference d = difference({1, -0.0F}, {1, 0.0F}, options);
  EXPECT_EQ(d.verdict, Verdict::kDifferent);
  EXPECT_EQ(d.failing, 1);
  EXPECT_EQ(d.worst.index, 1);
  EXPECT_EQ(d.max_absolute, 0);
}

TEST_F(Compare, ReportsWhatIsNotFinite) {
  const ParameterDifference same =
      difference({1, kNan, kInfinity, -kInfinity}, {1, -kNan, kInfinity, -kInfinity});
  EXPECT_EQ(same.verdict, Verdict::kSame);
  EXPECT_EQ(same.nonfinite_a, 3);
  EXPECT_EQ(same.nonfinite_b, 3);
  EXPECT_EQ(same.nonfinite_mismatches, 0);
  for (const auto& [a, b] : std::vector<std::pair<float, float>>{
           {kInfinity, -kInfinity}, {kNan, 0}, {1, kInfinity}, {kNan, kInfinity}}) {
    const ParameterDifference d = difference({5, 1, a}, {5.5F, 1, b});
    EXPECT_EQ(d.verdict, Verdict::kDifferent);
    EXPECT_EQ(d.nonfinite_mismatches, 1);
    EXPECT_EQ(d.worst.index, 2);
    EXPECT_EQ(d.max_absolute, 0.5);
  }
  CompareOptions options;
  options.rtol = 1e30;
  EXPECT_EQ(difference({kNan}, {1}, options).verdict, Verdict::kDifferent);
}

TEST_F(Compare, MeasuresTheWholeRangeOfDoubles) {
  const std::vector<double> a{1e300, -1e300, 3};
  const std::vector<double> b{1e300, 1e300, 3};
  std::vector<SnapshotEntry> entries(1);
  entries[0] = {"w", {3}, Dtype::kF64, Dtype::kF32, 0, {a.data(), 3, Dtype::kF64}};
  write_snapshot(folder_ / "a.h5", SnapshotInfo(), entries);
  entries[0].data.data = b.data();
  write_snapshot(folder_ / "b.h5", SnapshotInfo(), entries);
  const auto d =
      compare_snapshots(Snapshot::open(folder_ / "a.h5"), Snapshot::open(folder_ / "b.h5"))
          .parameters[0];
  EXPECT_EQ(d.max_absolute, 2e300);
  EXPECT_DOUBLE_EQ(d.relative_l2, std::sqrt(2.0));
  EXPECT_EQ(d.nonfinite_a, 0);
  EXPECT_EQ(d.worst.index, 1);
}

TEST_F(Compare, DoesNotDependOnThreads) {
  const std::int64_t count = 9 << 20;  // three pieces
  std::vector<NamedGradient> gradients{{"w", {count}, random_values(count, 1)},
                                       {"v", {1000}, random_values(1000, 2)}};
  const Snapshot b = write("b", gradients, mesh_info(1, 3));
  for (float& value : gradients[0].data) value *= 1.001F;
  const Snapshot a = write("a", gradients);
  CompareOptions one;
  one.thread_count = 1;
  CompareOptions many;
  many.thread_count = 5;
  double last = 0;
  bool rising = true;
  many.progress = [&](double fraction) {
    rising = rising && fraction > last;
    last = fraction;
  };
  const auto x = compare_snapshots(a, b, one).parameters[0];
  const auto y = compare_snapshots(a, b, many).parameters[0];
  EXPECT_EQ(x.relative_l2, y.relative_l2);
  EXPECT_EQ(x.cosine, y.cosine);
  EXPECT_EQ(x.worst.index, y.worst.index);
  EXPECT_TRUE(rising);
  EXPECT_EQ(last, 1);
}

TEST_F(Compare, DrawsErrorsAlongTheParameter) {
  CompareOptions options;
  options.detail = true;
  std::vector<float> a(1000, 1.0F);
  const std::vector<float> b = a;
  a[0] += 4;
  a[999] -= 0.25F;
  const ParameterDifference d = difference(a, b, options);
  ASSERT_EQ(d.heat.size(), 96U);
  EXPECT_EQ(d.heat[0].max, 4);
  EXPECT_DOUBLE_EQ(d.heat[0].root_mean_square, std::sqrt(16.0 / 11));  // 1000 = 40 * 11 + 56 * 10
  EXPECT_EQ(d.heat[1].max, 0);
  EXPECT_EQ(d.heat[95].max, 0.25);
  EXPECT_EQ(d.histogram.zero_count, 998);
  EXPECT_EQ(d.histogram.first_exponent, -2);
  EXPECT_EQ(d.histogram.counts, (std::vector<std::int64_t>{1, 0, 0, 0, 1}));
  EXPECT_EQ(difference({1, 2}, {1, 3}, options).heat.size(), 2U);
  // Detail changes no measure.
  const auto gradients = some_gradients(3);
  const Snapshot x = write("x", some_gradients(2), mesh_info(2, 3));
  const Snapshot y = write("y", gradients, mesh_info(1, 1));
  const Comparison plain = compare_snapshots(x, y);
  const Comparison detailed = compare_snapshots(x, y, options);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const auto& p = plain.parameters[i];
    const auto& q = detailed.parameters[i];
    EXPECT_EQ(p.name, q.name);
    EXPECT_EQ(p.max_absolute, q.max_absolute);
    EXPECT_EQ(p.worst.index, q.worst.index);
    EXPECT_NEAR(p.relative_l2, q.relative_l2, 1e-12);
    EXPECT_EQ(std::accumulate(q.histogram.counts.begin(), q.histogram.counts.end(),
                              q.histogram.zero_count),
              q.count);
  }
}

}  // namespace
}  // namespace hsdp
