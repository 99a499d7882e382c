// Snapshots of a Reducer's results and partials, read back.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "hsdp/compare.h"
#include "hsdp/error.h"
#include "hsdp/snapshot.h"
#include "tests/support/reducer_step.h"
#include "tests/support/temporary_directory.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

class ReducerSnapshot : public testing::Test {
 protected:
  [[nodiscard]] std::filesystem::path path(const std::string& name) const {
    return directory_ / name;
  }

  // Runs the step on a mesh of that shape and saves its result.
  void save(const StepCase& step, const ReducerOptions& options, MeshShape shape,
            const std::string& name) const {
    run_reducers(shape, step, options, [&](Reducer& reducer, const Mesh& mesh) {
      run_step(reducer, step, mesh.rank());
      reducer.save_snapshot(path(name), 7);
      reducer.flush_snapshots();
    });
  }

  [[nodiscard]] static Values read(const Snapshot& snapshot, std::size_t parameter, int replica) {
    Values values(static_cast<std::size_t>(snapshot.parameters()[parameter].count));
    snapshot.read(parameter, replica, 0, values);
    return values;
  }

  // The index of a parameter in the snapshot, which may order parameters differently.
  [[nodiscard]] static std::size_t find(const Snapshot& snapshot, const std::string& name) {
    const auto& parameters = snapshot.parameters();
    const auto at = std::ranges::find(parameters, name, &SnapshotParameter::name);
    return static_cast<std::size_t>(at - parameters.begin());
  }

 private:
  TemporaryDirectory directory_;
};

TEST_F(ReducerSnapshot, HoldsTheResultAndWhatMadeIt) {
  const MeshShape shape{.replicate = 2, .shard = 3};
  using Case = std::pair<Layout, ShardOver>;
  for (const auto& [layout, shard_over] :
       {Case{Layout::kFlat, ShardOver::kShard}, Case{Layout::kDim0, ShardOver::kShard},
        Case{Layout::kWhole, ShardOver::kShard}, Case{Layout::kFlat, ShardOver::kMesh},
        Case{Layout::kDim0, ShardOver::kMesh}, Case{Layout::kWhole, ShardOver::kMesh}}) {
    const ReducerOptions options{.replica_dtype = Dtype::kF16,
                                 .layout = layout,
                                 .bucket_bytes = 4 << 10,
                                 .shard_over = shard_over};
    StepCase step = random_step(odd_parameters(Dtype::kBf16), shape.size(),
                                {Sync::kShard, Sync::kNone, Sync::kAll}, 1);
    step.divide_factor = 12.5;
    step.loss_scale = 4.0;
    const std::string name(hsdp::name(layout));
    save(step, options, shape, name);
    const Snapshot snapshot = Snapshot::open(path(name));
    EXPECT_EQ(snapshot.info().step, 7);
    EXPECT_EQ(snapshot.info().replicate_size, 2);
    EXPECT_EQ(snapshot.info().shard_size, 3);
    EXPECT_EQ(snapshot.info().microbatch_count, 3);
    EXPECT_EQ(snapshot.info().divide_factor, 12.5);
    EXPECT_EQ(snapshot.info().loss_scale, 4.0);
    EXPECT_EQ(snapshot.info().replica_dtype, Dtype::kF16);
    EXPECT_EQ(snapshot.info().layout, name);
    EXPECT_FALSE(snapshot.info().partial);
    EXPECT_EQ(snapshot.parameters().size(), step.parameters.size());
    const std::vector<Values> want = reference_results(step, options, shape);
    for (std::size_t p = 0; p < step.parameters.size(); ++p) {
      const std::size_t at = find(snapshot, step.parameters[p].name);
      EXPECT_EQ(snapshot.parameters()[at].shape, step.parameters[p].shape);
      EXPECT_EQ(snapshot.parameters()[at].dtype, Dtype::kBf16);
      for (int replica = 0; replica < 2; ++replica) {
        expect_same_bits(read(snapshot, at, replica), want[p], name + step.parameters[p].name);
      }
    }
  }
}

TEST_F(ReducerSnapshot, ParametersOfSeveralDtypesAreJudgedEachByItsOwnWire) {
  const MeshShape shape{.replicate = 2, .shard = 1};
  const std::vector<ParameterSpec> kinds{{.name = "weight", .shape = {64}, .dtype = Dtype::kBf16},
                                         {.name = "norm", .shape = {64}, .dtype = Dtype::kF32}};
  for (const bool weight_first : {true, false}) {
    SCOPED_TRACE(weight_first);
    const std::size_t norm = weight_first ? 1 : 0;
    StepCase step = random_step({kinds[1 - norm], kinds[norm]}, shape.size(), {Sync::kAll}, 5);
    const std::string name = weight_first ? "weight first" : "norm first";
    save(step, {}, shape, name);
    for (auto& ranks : step.gradients[norm]) {
      for (auto& gradient : ranks) {
        for (float& value : *gradient) value *= 1.001F;
      }
    }
    save(step, {}, shape, name + ", off");
    const Comparison comparison =
        compare_snapshots(Snapshot::open(path(name + ", off")), Snapshot::open(path(name)));
    EXPECT_EQ(comparison.verdict, Verdict::kDifferent);
    for (const ParameterDifference& parameter : comparison.parameters) {
      const bool is_norm = parameter.name == "norm";
      EXPECT_EQ(parameter.coarsest, is_norm ? Dtype::kF32 : Dtype::kBf16);
      EXPECT_EQ(parameter.verdict, is_norm ? Verdict::kDifferent : Verdict::kSame);
    }
  }
}

TEST_F(ReducerSnapshot, OfAPartialHoldsEachReplicasOwnSum) {
  const MeshShape shape{.replicate = 2, .shard = 2};
  const StepCase step =
      random_step(odd_parameters(Dtype::kF32), shape.size(), {Sync::kShard, Sync::kShard}, 2);
  run_reducers(shape, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    run_schedule(reducer, step, mesh.rank());
    reducer.save_snapshot(path("partial"), 3);
    reducer.finish();
    reducer.flush_snapshots();
  });
  const Snapshot snapshot = Snapshot::open(path("partial"));
  EXPECT_TRUE(snapshot.info().partial);
  EXPECT_EQ(snapshot.info().divide_factor, 2.0);
  for (std::size_t p = 0; p < step.parameters.size(); ++p) {
    for (int replica = 0; replica < 2; ++replica) {
      expect_same_bits(
          read(snapshot, find(snapshot, step.parameters[p].name), replica),
          reference_partial(reference_step(step, {}, shape, p), step.gradients[p], replica),
          step.parameters[p].name);
    }
  }
}

TEST_F(ReducerSnapshot, ThatCannotBeWrittenLeavesTheReducerUsable) {
  const MeshShape shape{.replicate = 1, .shard = 2};
  const StepCase step = random_step({{.name = "w", .shape = {100}}}, 2, {Sync::kAll}, 7);
  expect_result(shape, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    EXPECT_THROW(reducer.save_snapshot(path("none"), 0), UsageError) << "there is no result";
    run_step(reducer, step, mesh.rank());
    const auto save_nowhere = [&] {
      reducer.save_snapshot("/proc/no such place/snapshot", 0);
      reducer.flush_snapshots();
    };
    EXPECT_THROW(save_nowhere(), SnapshotError);
    run_step(reducer, step, mesh.rank());
    reducer.save_snapshot(path("good"), 1);
    reducer.flush_snapshots();
  });
  EXPECT_EQ(Snapshot::open(path("good")).info().step, 1);
}

}  // namespace
}  // namespace hsdp
