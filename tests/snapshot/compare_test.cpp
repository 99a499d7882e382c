#include "hsdp/compare.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "hsdp/error.h"
#include "tests/kernels/caller_environment.h"
#include "tests/snapshot/written_snapshot.h"

namespace hsdp {
namespace {

using namespace hsdp::testing;
using ::testing::HasSubstr;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class Compare : public ::testing::Test {
 protected:
  Snapshot write(const std::string& name, const std::vector<NamedGradient>& gradients,
                 const SnapshotInfo& info = mesh_info(1, 1), Dtype wire = Dtype::kF32) {
    write_mesh(folder_ / name, gradients, info, wire);
    return Snapshot::open(folder_ / name);
  }

  // Writes a plain array "w".
  Snapshot write_array(const std::string& name, const ConstTensorView& data) {
    const SnapshotEntry entry{"w", {data.count}, data.dtype, Dtype::kF32, 0, data};
    write_snapshot(folder_ / name, SnapshotInfo(), {&entry, 1});
    return Snapshot::open(folder_ / name);
  }

  // Compares two snapshots of one parameter, each sliced over two ranks.
  ParameterDifference difference(const std::vector<float>& a, const std::vector<float>& b,
                                 const CompareOptions& options = {}, Dtype wire = Dtype::kF32) {
    const Shape shape{static_cast<std::int64_t>(a.size())};
    const Snapshot x = write("a", {{"w", shape, a}}, mesh_info(1, 2), wire);
    const Snapshot y = write("b", {{"w", shape, b}}, mesh_info(1, 2), wire);
    return compare_snapshots(x, y, options).parameters.at(0);
  }

  std::string refusal(const Snapshot& a, const Snapshot& b, const CompareOptions& options = {}) {
    try {
      static_cast<void>(compare_snapshots(a, b, options));
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  TemporaryDirectory folder_;
};

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

TEST_F(Compare, CountsSubnormalsWhateverTheCallerHasSet) {
  ParameterDifference d;
  kernels::run_in_environment(true, [&] { d = difference({1e-40F, 1e-41F}, {1e-40F, 3e-41F}); });
  EXPECT_EQ(d.verdict, Verdict::kDifferent);
  EXPECT_EQ(d.max_absolute, static_cast<double>(3e-41F) - static_cast<double>(1e-41F));
}

TEST_F(Compare, TakesTheLimitOfTheCoarsestWire) {
  const std::tuple<Dtype, float, float> rows[] = {{Dtype::kF32, 0x1p-20F, 0x1p-19F},
                                                  {Dtype::kF16, 0x1p-9F, 0x1p-8F},
                                                  {Dtype::kBf16, 0x1p-6F, 0x1p-5F}};
  const std::vector<float> ones(64, 1.0F);
  for (const auto& [wire, within, above] : rows) {
    const auto verdict = [&, wire = wire](float off) {
      return difference(std::vector<float>(64, 1 + off), ones, {}, wire).verdict;
    };
    EXPECT_EQ(verdict(within), Verdict::kSame) << name(wire);
    EXPECT_EQ(verdict(above), Verdict::kDifferent) << name(wire);
  }
}

TEST_F(Compare, CountsAWireOnlyWhereItsHopRan) {
  struct Case {
    int replicate;
    int shard;
    Dtype reduce;
    std::optional<Dtype> replica;
    Dtype coarsest;
  };
  using enum Dtype;
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

// f64 gradients are sent as f64, whatever wire dtypes the run has.
TEST_F(Compare, TakesTheLimitOfF64WhereGradientsAre) {
  const std::vector<double> values(4, 1.0);
  for (const auto& [replicate, shard] : {std::pair{2, 1}, std::pair{1, 1}}) {
    SnapshotInfo info = mesh_info(replicate, shard);
    info.replica_dtype = Dtype::kBf16;
    const SnapshotEntry entry{"w",         {4}, Dtype::kF64,
                              Dtype::kF64, 0,   {values.data(), 4, Dtype::kF64}};
    const std::filesystem::path path = folder_ / std::to_string(replicate);
    for (info.rank = 0; info.rank < replicate; ++info.rank) {
      write_snapshot_file(path, info, {&entry, 1});
    }
    const Snapshot run = Snapshot::open(path);
    EXPECT_EQ(compare_snapshots(run, run).parameters[0].coarsest, Dtype::kF64) << replicate;
  }
}

// Exceeding either of the two measures is enough to fail.
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
  CompareOptions options{.rtol = 0.25};
  EXPECT_EQ(difference({1.25F, -5}, {1, -4}, options).verdict, Verdict::kSame);
  const ParameterDifference d = difference({1.25F, -5.5F, 10}, {1, -4, 9}, options);
  EXPECT_EQ(d.verdict, Verdict::kDifferent);
  EXPECT_EQ(d.failing, 1);
  EXPECT_EQ(d.worst.index, 1);
  // rtol is relative to b.
  EXPECT_EQ(difference({4}, {5}, options).verdict, Verdict::kSame);
  EXPECT_EQ(difference({5.5F}, {4}, options).verdict, Verdict::kDifferent);
  options.atol = 0.5;
  EXPECT_EQ(difference({5.5F}, {4}, options).verdict, Verdict::kSame);
  EXPECT_EQ(difference({1}, {1}, {.atol = 0}).verdict, Verdict::kSame);
  EXPECT_EQ(difference({1}, {1.0000001F}, {.atol = 0}).verdict, Verdict::kDifferent);
}

// The worst element is one that fails, even if a passing element differs more.
TEST_F(Compare, NamesAnElementThatFails) {
  const ParameterDifference d = difference({1000, 1}, {1050, 2}, {.rtol = 0.1});
  EXPECT_EQ(d.failing, 1);
  EXPECT_EQ(d.worst.index, 1);
}

TEST_F(Compare, CountsUlps) {
  const CompareOptions options{.ulp = 2};
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
  const CompareOptions options{.bitwise = true};
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
  EXPECT_EQ(difference({kNan}, {1}, {.rtol = 1e30}).verdict, Verdict::kDifferent);
}

TEST_F(Compare, MeasuresTheWholeRangeOfDoubles) {
  const std::vector<double> a{1e300, -1e300, 3};
  const std::vector<double> b{1e300, 1e300, 3};
  const auto d = compare_snapshots(write_array("a.h5", {a.data(), 3, Dtype::kF64}),
                                   write_array("b.h5", {b.data(), 3, Dtype::kF64}))
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
  double last = 0;
  bool rising = true;
  const auto progress = [&](double fraction) {
    rising = rising && fraction > last;
    last = fraction;
  };
  const auto x = compare_snapshots(a, b, {.thread_count = 1}).parameters[0];
  const auto y = compare_snapshots(a, b, {.thread_count = 5, .progress = progress}).parameters[0];
  EXPECT_EQ(x.relative_l2, y.relative_l2);
  EXPECT_EQ(x.cosine, y.cosine);
  EXPECT_EQ(x.worst.index, y.worst.index);
  EXPECT_TRUE(rising);
  EXPECT_EQ(last, 1);
}

TEST_F(Compare, DrawsErrorsAlongTheParameter) {
  const CompareOptions options{.detail = true};
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
  // Asking for details changes no measure.
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

TEST_F(Compare, ComparesStoredDtypes) {
  const std::vector<std::uint16_t> bf16{0x3f80, 0x4000};
  const Snapshot a = write_array("a.h5", {bf16.data(), 2, Dtype::kBf16});
  const Snapshot b = write("b", {{"w", {2}, {1.003F, 2}}});
  const Comparison comparison = compare_snapshots(a, b);
  EXPECT_EQ(comparison.verdict, Verdict::kSame);
  EXPECT_EQ(comparison.parameters[0].coarsest, Dtype::kBf16);
}

TEST_F(Compare, RefusesOtherParameters) {
  const Snapshot a = write("a", {{"both", {2}, {1, 2}}, {"mine", {1}, {1}}, {"s", {2, 1}, {1, 2}}});
  const Snapshot b = write("b", {{"s", {1, 2}, {1, 2}}, {"both", {2}, {1, 2}}, {"new", {1}, {1}}});
  EXPECT_EQ(refusal(a, b),
            "compare: the parameters differ; only in the first: mine; only in the second: new; "
            "shapes: s (2, 1) and (1, 2)");
}

TEST_F(Compare, MatchesParametersByName) {
  const Snapshot a = write("a", {{"x", {1}, {1}}, {"y", {2}, {2, 3}}});
  const Snapshot b = write("b", {{"y", {2}, {2, 3}}, {"x", {1}, {1}}});
  EXPECT_EQ(compare_snapshots(a, b).verdict, Verdict::kSame);
}

TEST_F(Compare, RefusesContradictoryOptions) {
  const Snapshot a = write("a", {{"x", {1}, {1}}});
  EXPECT_THAT(refusal(a, a, {.rtol = 1, .bitwise = true}), HasSubstr("choose one"));
  EXPECT_THAT(refusal(a, a, {.ulp = -1}), HasSubstr("expected ulp finite"));
}

class ComparePartials : public Compare {
 protected:
  // Two replicas whose sums differ.
  Snapshot write_partial(const std::string& name, double divide_factor, int shard,
                         float second_scale) {
    SnapshotInfo info = mesh_info(2, shard);
    info.partial = true;
    info.divide_factor = divide_factor;
    for (info.rank = 0; info.rank < 2 * shard; ++info.rank) {
      const float scale = info.rank < shard ? 1 : second_scale;
      std::vector<NamedGradient> sums{{"w", {4}, {}}};
      for (int i = 0; i < 4; ++i) {
        sums[0].data.push_back(scale * static_cast<float>(i * divide_factor));
      }
      write_snapshot_file(folder_ / name, info, slices_of(sums, info));
    }
    return Snapshot::open(folder_ / name);
  }
};

TEST_F(ComparePartials, ReplicaByReplicaAfterTheDivision) {
  const Snapshot a = write_partial("a", 2, 2, 3);
  EXPECT_EQ(compare_snapshots(a, write_partial("b", 4, 1, 3)).verdict, Verdict::kSame);
  const Comparison other = compare_snapshots(a, write_partial("c", 4, 1, 5));
  EXPECT_EQ(other.verdict, Verdict::kDifferent);
  EXPECT_EQ(other.parameters[0].worst.replica, 1);
  EXPECT_EQ(other.parameters[0].worst.index, 3);
  EXPECT_EQ(other.parameters[0].max_absolute, 6);
}

TEST_F(ComparePartials, NotWithResultsNorWithOtherReplicateSizes) {
  const Snapshot a = write_partial("a", 2, 1, 1);
  const std::vector<NamedGradient> result{{"w", {4}, {0, 1, 2, 3}}};
  EXPECT_THAT(refusal(a, write("full", result, mesh_info(2, 1))), HasSubstr("a partial against"));
  SnapshotInfo info = mesh_info(1, 1);
  info.partial = true;
  EXPECT_THAT(refusal(a, write("one", result, info)), HasSubstr("equal replicate sizes"));
}

TEST_F(Compare, RefusesUnequalReplicas) {
  auto gradients = some_gradients();
  const Snapshot reference = write("reference", gradients);
  write_mesh(folder_ / "s", gradients, mesh_info(2, 2));
  gradients[6].data.back() += 1;
  SnapshotInfo info = mesh_info(2, 2);
  info.rank = 3;
  write_snapshot_file(folder_ / "s", info, slices_of(gradients, info));
  EXPECT_THAT(refusal(Snapshot::open(folder_ / "s"), reference),
              HasSubstr("'big' element 200098 differs between copies 0 and 1"));
}

TEST_F(Compare, ReportsAQuantizingHopWithoutJudging) {
  SnapshotInfo info = mesh_info(2, 1);
  info.replica_hop = "loco(bits=4)";
  info.quantizes = true;
  const Snapshot a = write("a", {{"w", {2}, {1, 2}}}, info);
  const Snapshot b = write("b", {{"w", {2}, {1.5F, 2}}});
  EXPECT_EQ(compare_snapshots(a, b).verdict, Verdict::kNotJudged);
  EXPECT_EQ(compare_snapshots(a, b, {.rtol = 0.4}).verdict, Verdict::kSame);
  EXPECT_EQ(compare_snapshots(a, b, {.rtol = 0.2}).verdict, Verdict::kDifferent);
}

}  // namespace
}  // namespace hsdp
