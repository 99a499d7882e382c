// A plan made before anything is allocated equals, to the byte, what stats() counts after some
// steps.
#include "hsdp/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/reducer.h"
#include "hsdp/reducer_internal.h"
#include "quant/loco_hop.h"
#include "tests/support/planned_fields.h"
#include "tests/support/reducer_step.h"
#include "zero/adamw.h"
#include "zero/parameter_gather.h"
#include "zero/unit_gather.h"

namespace hsdp {
namespace {

using test::fields_of;
using test::MeshShape;
using testing::HasSubstr;
using testing::ThrowsMessage;

const std::vector<MeshShape> kShapes{{1, 4}, {2, 2}, {4, 1}, {3, 2}};
constexpr int kSteps = 2;

// Parameters that share buckets, are cut, are empty or have one element, in buckets of both wire
// dtypes.
std::vector<ParameterSpec> parameters(Dtype dtype) {
  return {{.name = "norm", .shape = {37}, .dtype = dtype},
          {.name = "large", .shape = {70, 60}, .dtype = dtype},
          {.name = "empty", .shape = {0}, .dtype = dtype},
          {.name = "rows", .shape = {11, 13}},
          {.name = "scalar", .shape = {}, .dtype = dtype}};
}

struct PlanCase {
  ReducerOptions options;
  std::vector<Sync> schedule;
  MemoryUse use;
  Dtype dtype = Dtype::kF32;
  bool in_window = false;
};

int reduced_of(const PlanCase& row) {
  if (row.in_window) return 1;
  return static_cast<int>(
      std::ranges::count_if(row.schedule, [](Sync s) { return s != Sync::kNone; }));
}

void run_planned_step(Reducer& reducer, const PlanCase& row, const test::StepCase& step, int rank) {
  if (!row.in_window) return test::run_schedule(reducer, step, rank);
  reducer.begin_window(
      {.last = true, .accumulate_dtype = row.use.local_sums.value_or(AccumulateDtype::kF32)});
  std::vector<std::vector<test::StoredGradient>> stored;
  for (std::size_t m = 0; m < row.schedule.size(); ++m) {
    stored.push_back(test::deliver(reducer, step, static_cast<int>(m), rank));
  }
  reducer.end_window();
}

// `make_hop` makes one for each rank.
void expect_planned(const PlanCase& row,
                    const std::function<std::shared_ptr<ReplicaHop>()>& make_hop = {}) {
  for (const MeshShape shape : kShapes) {
    for (const ShardOver over : {ShardOver::kShard, ShardOver::kMesh}) {
      SCOPED_TRACE(to_string(shape) + " over " + std::string(word_of(over)));
      const test::StepCase step =
          test::random_step(parameters(row.dtype), shape.size(), row.schedule, 7);
      test::run_mesh(shape, [&](const Mesh& mesh) {
        ReducerOptions options = row.options;
        options.bucket_bytes = 4096;
        options.shard_over = over;
        if (make_hop) options.replica_hop = make_hop();
        Reducer reducer(mesh, options);
        test::register_all(reducer, step);
        const MemoryPlan plan = reducer.memory_plan(row.use);
        EXPECT_GT(plan.carry_bytes, 0);
        EXPECT_EQ(reducer.stats().resident_bytes, 0) << "a plan takes no memory";
        for (int s = 0; s < kSteps; ++s) {
          run_planned_step(reducer, row, step, mesh.rank());
          static_cast<void>(reducer.shard("large"));
        }
        const ReducerStats stats = reducer.stats();
        EXPECT_EQ(plan.parameter_gather_bytes, 0);
        EXPECT_EQ(fields_of(plan), test::counted_fields(stats, kSteps * reduced_of(row), kSteps));
        EXPECT_EQ(fields_of(plan), fields_of(reducer.memory_plan(row.use)));
        EXPECT_EQ(stats.shard_hop_bytes > 0, shape.shard > 1);
        EXPECT_EQ(stats.replica_hop_bytes > 0, shape.replicate > 1);
      });
    }
  }
}

TEST(MemoryPlan, IsWhatPlainHopsTakeAndSend) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF64}) {
    SCOPED_TRACE(name(dtype));
    expect_planned({.options = {}, .schedule = {Sync::kShard, Sync::kAll}, .dtype = dtype});
    expect_planned({.options = {.reduce_dtype = Dtype::kBf16, .replica_dtype = Dtype::kF32},
                    .schedule = {Sync::kAll},
                    .dtype = dtype});
  }
  expect_planned({.options = {.replica_dtype = Dtype::kBf16, .layout = Layout::kDim0},
                  .schedule = {Sync::kShard, Sync::kAll}});
  expect_planned({.options = {.layout = Layout::kWhole}, .schedule = {Sync::kAll}});
}

TEST(MemoryPlan, IsWhatLocoTakesAndSends) {
  for (const quant::LocoOptions& options : std::vector<quant::LocoOptions>{
           {},
           {.bits = 8, .group_size = 32, .error_dtype = Dtype::kF32, .exclude = {"norm"}},
           {.gather = quant::Code::kBf16, .exclude = {"large"}, .plain_dtype = Dtype::kBf16},
           {.error_feedback = false}}) {
    SCOPED_TRACE(quant::describe(options));
    const auto make = [&options] { return std::make_shared<quant::LocoHop>(options); };
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
      expect_planned({.options = {}, .schedule = {Sync::kShard, Sync::kAll}, .dtype = dtype}, make);
    }
  }
}

TEST(MemoryPlan, KnowsThePlainRowsOfAWarmUpOverTheMesh) {
  const auto make = [] {
    return std::make_shared<quant::LocoHop>(
        quant::LocoOptions{.plain_dtype = Dtype::kBf16, .warmup_steps = 1});
  };
  test::run_mesh(test::kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh,
                    {.bucket_bytes = 4096, .replica_hop = make(), .shard_over = ShardOver::kMesh});
    for (const ParameterSpec& spec : parameters(Dtype::kF32)) reducer.register_parameter(spec);
    const MemoryPlan plan = reducer.memory_plan();
    reducer.prepare();
    EXPECT_EQ(reducer.stats().replica_hop_state_bytes, plan.replica_hop_state_bytes);
    EXPECT_EQ(reducer.stats().staging_bytes, plan.staging_bytes);
  });
}

TEST(MemoryPlan, HasLocalSumsWhereStepsKeepThem) {
  for (const AccumulateDtype sums : {AccumulateDtype::kF32, AccumulateDtype::kParam}) {
    const ReducerOptions options{.accumulate_dtype = sums};
    const MemoryUse use{.local_sums = sums};
    expect_planned({.options = options,
                    .schedule = {Sync::kNone, Sync::kNone, Sync::kAll},
                    .use = use,
                    .dtype = Dtype::kBf16});
    expect_planned({.options = options,
                    .schedule = {Sync::kShard, Sync::kShard},
                    .use = use,
                    .dtype = Dtype::kBf16,
                    .in_window = true});
  }
  // The plan follows from the Reducer's options and flags.
  expect_planned({.options = {.backwards = Backwards::kMany}, .schedule = {Sync::kAll}});
  test::run_mesh({1, 2}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {100}});
    EXPECT_EQ(reducer.memory_plan().accumulator_bytes, 0);
    reducer.set_partial_sync(Sync::kNone);
    EXPECT_EQ(reducer.memory_plan().accumulator_bytes, 448) << "400, to a cache line";
  });
}

TEST(MemoryPlan, HasTotalsWhereGroupsEndEarly) {
  for (const MeshShape shape : kShapes) {
    for (const ShardOver over : {ShardOver::kShard, ShardOver::kMesh}) {
      SCOPED_TRACE(to_string(shape) + " over " + std::string(word_of(over)));
      test::StepCase step =
          test::random_step(parameters(Dtype::kF32), shape.size(), {Sync::kAll, Sync::kAll}, 3);
      for (std::size_t p = 0; p < 3; ++p) step.parameters[p].group = "late";
      test::run_mesh(shape, [&](const Mesh& mesh) {
        Reducer reducer(mesh, {.bucket_bytes = 4096, .shard_over = over});
        test::register_all(reducer, step);
        const MemoryPlan plan = reducer.memory_plan({.totals = true});
        reducer.set_requires_all_reduce(false, "late");
        test::run_microbatch(reducer, step, 0, mesh.rank(), {});
        reducer.set_requires_all_reduce(true, "late");
        test::run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
        static_cast<void>(reducer.shard("large"));
        EXPECT_GT(plan.total_bytes, 0);
        EXPECT_EQ(reducer.stats().total_bytes, plan.total_bytes);
        EXPECT_EQ(reducer.stats().resident_bytes, plan.resident_bytes);
      });
    }
  }
}

// Whole arrays, and the fp32 masters of this rank's slices.
struct Model {
  std::vector<std::vector<float>> arrays;
  std::vector<std::vector<float>> masters;
  std::vector<zero::GatheredParameter> gathered;
  std::vector<zero::AdamWParameter> sliced;
  std::vector<zero::UnitParameter> stored;

  explicit Model(Reducer& reducer) {
    for (const ParameterSpec& spec : reducer.parameters()) {
      const std::int64_t count = element_count(spec.shape);
      std::vector<float>& array = arrays.emplace_back(static_cast<std::size_t>(count));
      const std::int64_t own = reducer.slice(spec.name).count;
      std::vector<float>& master = masters.emplace_back(static_cast<std::size_t>(own));
      gathered.push_back({.name = spec.name, .array = {array.data(), count}});
      sliced.push_back({.name = spec.name, .slice = {master.data(), own}});
      stored.push_back({.name = spec.name,
                        .dtype = Dtype::kF32,
                        .count = count,
                        .stored = {master.data(), own}});
    }
  }
};

TEST(MemoryPlan, HasOptimizersAndGathersThatThereAre) {
  for (const MeshShape shape : kShapes) {
    for (const ShardOver over : {ShardOver::kShard, ShardOver::kMesh}) {
      SCOPED_TRACE(to_string(shape) + " over " + std::string(word_of(over)));
      test::run_mesh(shape, [&](const Mesh& mesh) {
        Reducer reducer(mesh, {.bucket_bytes = 4096, .shard_over = over});
        for (const ParameterSpec& spec : parameters(Dtype::kF32)) reducer.register_parameter(spec);
        EXPECT_EQ(reducer.memory_plan().optimizer_bytes, 0);
        Model model(reducer);
        const zero::AdamW optimizer(reducer, model.sliced);
        std::int64_t moments = 0;
        for (const auto& one : model.sliced) moments += zero::AdamW::moment_bytes(one.slice.count);
        EXPECT_EQ(reducer.memory_plan().optimizer_bytes, moments);
        EXPECT_EQ(reducer.stats().optimizer_bytes, moments);
        {
          zero::ParameterGather gather(reducer, model.gathered, 8192);
          const std::int64_t planned = reducer.memory_plan().parameter_gather_bytes;
          gather.start_all({});
          gather.wait_all();
          EXPECT_EQ(ReducerInternal(reducer).memory_count().of(MemoryKind::kParameterGather).peak,
                    planned);
          EXPECT_EQ(planned > 0, shape.shard > 1 || over == ShardOver::kMesh);
        }
        EXPECT_EQ(reducer.memory_plan().parameter_gather_bytes, 0) << "the gather is gone";
      });
    }
  }
}

TEST(MemoryPlan, HasTheMessagesOfUnits) {
  for (const MeshShape shape : {MeshShape{1, 4}, MeshShape{2, 2}, MeshShape{4, 1}}) {
    test::run_mesh(shape, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.bucket_bytes = 4096});
      for (const ParameterSpec& spec : parameters(Dtype::kF32)) reducer.register_parameter(spec);
      Model model(reducer);
      std::vector<TensorView> arrays;
      for (const auto& one : model.gathered) arrays.push_back(one.array);
      zero::UnitGather gather(reducer, {{.name = "all", .parameters = model.stored}});
      const std::int64_t planned = reducer.memory_plan().parameter_gather_bytes;
      static_cast<void>(gather.gather(0, arrays, {}));
      gather.wait(0);
      gather.end({}).wait();
      EXPECT_EQ(ReducerInternal(reducer).memory_count().of(MemoryKind::kParameterGather).peak,
                planned);
      EXPECT_EQ(planned, shape.shard > 1 ? 4 * (37 + 70 * 60 + 11 * 13 + 1) : 0);
    });
  }
}

TEST(MemoryPlan, SaysWhatItNeeds) {
  test::run_mesh({1, 1}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    EXPECT_THAT([&] { static_cast<void>(reducer.memory_plan()); },
                ThrowsMessage<UsageError>(HasSubstr(
                    "reducer: memory_plan: expected registered parameters, got none; attach")));
  });
}

}  // namespace
}  // namespace hsdp
