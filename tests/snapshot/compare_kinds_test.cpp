// Which snapshots can be compared with which.
#include <gmock/gmock.h>

#include <tuple>

#include "hsdp/compare.h"
#include "hsdp/error.h"
#include "tests/snapshot/compare_fixture.h"

namespace hsdp {
namespace {

using namespace hsdp::testing;
using ::testing::HasSubstr;

TEST_F(Compare, FindsTheSameAcrossMeshesAndLayouts) {
  const auto gradients = some_gradients();
  const Snapshot reference = write("reference", gradients, mesh_info(1, 1));
  CompareOptions bitwise;
  bitwise.bitwise = true;
  for (const auto& [replicate, shard, layout] : std::vector<std::tuple<int, int, std::string>>{
           {2, 2, "flat"}, {1, 4, "dim0"}, {4, 1, "flat"}, {1, 7, "flat"}, {2, 2, "full"}}) {
    const std::string name = layout + std::to_string(replicate) + std::to_string(shard);
    const Snapshot other = write(name, gradients, mesh_info(replicate, shard, layout));
    for (const auto& options : {CompareOptions(), bitwise}) {
      const Comparison comparison = compare_snapshots(other, reference, options);
      EXPECT_EQ(comparison.verdict, Verdict::kSame) << name;
      for (const auto& parameter : comparison.parameters) {
        EXPECT_EQ(parameter.max_absolute, 0) << parameter.name;
        EXPECT_EQ(parameter.relative_l2, 0);
        EXPECT_EQ(parameter.max_ulp, 0);
        EXPECT_NEAR(parameter.cosine, 1, 1e-12);
      }
    }
  }
}

TEST_F(Compare, ComparesStoredDtypes) {
  const std::vector<std::uint16_t> bf16{0x3f80, 0x4000};
  std::vector<SnapshotEntry> entries(1);
  entries[0] = {"w", {2}, Dtype::kBf16, Dtype::kF32, 0, {bf16.data(), 2, Dtype::kBf16}};
  write_snapshot(folder_ / "a.h5", SnapshotInfo(), entries);
  const Snapshot a = Snapshot::open(folder_ / "a.h5");
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
  CompareOptions options;
  options.bitwise = true;
  options.rtol = 1;
  EXPECT_THAT(refusal(a, a, options), HasSubstr("choose one"));
  CompareOptions negative;
  negative.ulp = -1;
  EXPECT_THAT(refusal(a, a, negative), HasSubstr("expected ulp finite"));
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
  CompareOptions options;
  options.rtol = 0.4;
  EXPECT_EQ(compare_snapshots(a, b, options).verdict, Verdict::kSame);
  options.rtol = 0.2;
  EXPECT_EQ(compare_snapshots(a, b, options).verdict, Verdict::kDifferent);
}

}  // namespace
}  // namespace hsdp
