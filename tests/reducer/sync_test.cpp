// Which sync a microbatch runs: explicit, last, flags; and flags per group.
#include <gtest/gtest.h>

#include <latch>
#include <ostream>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

// What the last microbatch left: a result, a carry that can be read, or local sums only.
Sync observed(Reducer& reducer) {
  if (!caught<UsageError>([&] { static_cast<void>(reducer.shard("w")); })) return Sync::kAll;
  if (!caught<UsageError>([&] { static_cast<void>(reducer.partial_shard("w")); })) {
    return Sync::kShard;
  }
  return Sync::kNone;
}

struct Precedence {
  std::string label;
  bool gradient_sync;
  bool all_reduce;
  MicrobatchOptions options;
  std::optional<Sync> want;  // none: a UsageError
};

void PrintTo(const Precedence& row, std::ostream* out) { *out << row.label; }

std::vector<Precedence> precedence_table() {
  constexpr bool kOn = true;
  constexpr bool kOff = false;
  return {
      {"default", kOn, kOn, {}, Sync::kAll},
      {"all_reduce_off", kOn, kOff, {}, Sync::kShard},
      {"sync_off", kOff, kOn, {}, Sync::kNone},
      {"both_off", kOff, kOff, {}, Sync::kNone},
      {"last", kOn, kOn, {.last = true}, Sync::kAll},
      {"not_last", kOn, kOn, {.last = false}, Sync::kShard},
      {"last_over_all_reduce_off", kOn, kOff, {.last = true}, Sync::kAll},
      {"not_last_all_reduce_off", kOn, kOff, {.last = false}, Sync::kShard},
      {"not_last_sync_off", kOff, kOn, {.last = false}, Sync::kNone},
      {"last_sync_off", kOff, kOn, {.last = true}, std::nullopt},
      {"last_both_off", kOff, kOff, {.last = true}, std::nullopt},
      {"explicit_all_over_flags", kOff, kOff, {.sync = Sync::kAll}, Sync::kAll},
      {"explicit_shard_over_flags", kOff, kOn, {.sync = Sync::kShard}, Sync::kShard},
      {"explicit_none_over_flags", kOn, kOn, {.sync = Sync::kNone}, Sync::kNone},
      {"explicit_all_over_not_last", kOn, kOn, {.last = false, .sync = Sync::kAll}, Sync::kAll},
      {"explicit_none_over_not_last", kOn, kOn, {.last = false, .sync = Sync::kNone}, Sync::kNone},
  };
}

class SyncPrecedence : public testing::TestWithParam<Precedence> {};

TEST_P(SyncPrecedence, Decides) {
  const Precedence& row = GetParam();
  const StepCase step = integer_step({{.name = "w", .shape = {50}}}, kSquare.size(), 1, 2);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 64});
    register_all(reducer, step);
    reducer.set_requires_gradient_sync(row.gradient_sync);
    reducer.set_requires_all_reduce(row.all_reduce);
    if (!row.want) {
      EXPECT_TRUE(caught<UsageError>([&] { reducer.begin_microbatch(row.options); }));
      run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kAll});
      EXPECT_EQ(observed(reducer), Sync::kAll) << "the refused begin changed nothing";
      return;
    }
    run_microbatch(reducer, step, 0, mesh.rank(), row.options);
    EXPECT_EQ(observed(reducer), *row.want);
    reducer.discard();
    const ReducerStats stats = reducer.stats();
    EXPECT_EQ(stats.reduce_scatter_count, *row.want == Sync::kNone ? 0 : stats.bucket_count);
    EXPECT_EQ(stats.all_reduce_count, *row.want == Sync::kAll ? stats.bucket_count : 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Table, SyncPrecedence, testing::ValuesIn(precedence_table()),
                         [](const auto& row) { return row.param.label; });

// Two groups, set apart by flags, of which "late" synchronizes less often.
class Groups : public testing::TestWithParam<Dtype> {
 protected:
  static constexpr std::size_t kLate = 0;
  static constexpr std::size_t kEarly = 1;

  [[nodiscard]] StepCase step(int microbatch_count, std::uint64_t seed) const {
    return random_step({{.name = "late", .shape = {130, 3}, .group = "late"},
                        {.name = "early", .shape = {301}, .group = "early"}},
                       kSquare.size(),
                       std::vector<Sync>(static_cast<std::size_t>(microbatch_count), Sync::kAll),
                       seed);
  }

  // The wire dtypes of the parameter; replica hop in f16 exercises the headroom of each hop.
  [[nodiscard]] ReducerOptions options() const {
    return {.reduce_dtype = GetParam(), .bucket_bytes = 512};
  }

  void expect_group(std::span<const RankResult> results, const StepCase& step,
                    std::size_t parameter, std::vector<Sync> schedule, bool finish) const {
    StepCase group = step;
    group.schedule = std::move(schedule);
    group.finish = finish;
    const Values want = reference_result(reference_step(group, options(), kSquare, parameter),
                                         step.gradients[parameter]);
    for (int replica = 0; replica < kSquare.replicate; ++replica) {
      expect_same_bits(joined(results, kSquare.shard, replica, parameter,
                              element_count(step.parameters[parameter].shape)),
                       want, step.parameters[parameter].name);
    }
  }

  static void set_flags(Reducer& reducer, bool late_sync, bool late_all_reduce) {
    reducer.set_requires_gradient_sync(late_sync, "late");
    reducer.set_requires_all_reduce(late_all_reduce, "late");
  }
};

TEST_P(Groups, AGroupThatIsAllMidStepKeepsItsTotals) {
  const StepCase first = step(3, 1);
  const StepCase second = step(1, 2);
  std::vector<RankResult> first_results(4);
  std::vector<RankResult> second_results(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const auto rank = static_cast<std::size_t>(mesh.rank());
    Reducer reducer(mesh, options());
    register_all(reducer, first);
    set_flags(reducer, true, false);
    run_microbatch(reducer, first, 0, mesh.rank(), {});  // late: shard, early: all
    set_flags(reducer, false, false);
    run_microbatch(reducer, first, 1, mesh.rank(), {});  // late: none, early: all
    EXPECT_GT(reducer.stats().total_bytes, 0);
    set_flags(reducer, true, true);
    run_microbatch(reducer, first, 2, mesh.rank(), {});  // every group is all: the step ends
    first_results[rank] = read_result(reducer, first);
    run_microbatch(reducer, second, 0, mesh.rank(), {});
    second_results[rank] = read_result(reducer, second);
  });
  expect_group(first_results, first, kLate, {Sync::kShard, Sync::kNone, Sync::kAll}, false);
  expect_group(first_results, first, kEarly, {Sync::kAll, Sync::kAll, Sync::kAll}, false);
  expect_group(second_results, second, kLate, {Sync::kAll}, false);
  expect_group(second_results, second, kEarly, {Sync::kAll}, false);
}

TEST_P(Groups, FinishCompletesTheGroupThatIsPending) {
  const StepCase first = step(2, 3);
  std::vector<RankResult> results(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options());
    register_all(reducer, first);
    set_flags(reducer, true, false);
    run_microbatch(reducer, first, 0, mesh.rank(), {});  // late: shard, early: all
    set_flags(reducer, false, false);
    run_microbatch(reducer, first, 1, mesh.rank(), {});  // late: none, early: all
    reducer.finish();
    results[static_cast<std::size_t>(mesh.rank())] = read_result(reducer, first);
  });
  expect_group(results, first, kLate, {Sync::kShard, Sync::kNone}, true);
  expect_group(results, first, kEarly, {Sync::kAll, Sync::kAll}, true);
}

TEST_P(Groups, LastEndsTheStepForAllGroups) {
  const StepCase first = step(2, 4);
  std::vector<RankResult> results(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options());
    register_all(reducer, first);
    set_flags(reducer, true, false);
    run_microbatch(reducer, first, 0, mesh.rank(), {});
    run_microbatch(reducer, first, 1, mesh.rank(), {.last = true});
    results[static_cast<std::size_t>(mesh.rank())] = read_result(reducer, first);
  });
  expect_group(results, first, kLate, {Sync::kShard, Sync::kAll}, false);
  expect_group(results, first, kEarly, {Sync::kAll, Sync::kAll}, false);
}

TEST_P(Groups, DiscardDropsTotalsToo) {
  const StepCase dropped = step(1, 5);
  const StepCase kept = step(1, 6);
  std::vector<RankResult> results(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options());
    register_all(reducer, kept);
    set_flags(reducer, true, false);
    run_microbatch(reducer, dropped, 0, mesh.rank(), {});
    reducer.discard();
    set_flags(reducer, true, true);
    run_microbatch(reducer, kept, 0, mesh.rank(), {});
    results[static_cast<std::size_t>(mesh.rank())] = read_result(reducer, kept);
  });
  expect_group(results, kept, kLate, {Sync::kAll}, false);
  expect_group(results, kept, kEarly, {Sync::kAll}, false);
}

TEST_P(Groups, CountTheirOwnBuckets) {
  const StepCase first = step(2, 7);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options());
    register_all(reducer, first);
    set_flags(reducer, true, true);
    run_microbatch(reducer, first, 0, mesh.rank(), {});
    static_cast<void>(reducer.shard("late"));
    const ReducerStats whole = reducer.stats();
    set_flags(reducer, false, true);
    run_microbatch(reducer, first, 1, mesh.rank(), {});
    reducer.discard();
    const ReducerStats after = reducer.stats();
    const auto early = after.reduce_scatter_count - whole.reduce_scatter_count;
    EXPECT_GT(early, 0);
    EXPECT_LT(early, whole.bucket_count);
    EXPECT_EQ(after.all_reduce_count - whole.all_reduce_count, early);
  });
}

TEST_P(Groups, LastWithOneGroupsSyncOffIsAnError) {
  const StepCase first = step(1, 8);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options());
    register_all(reducer, first);
    set_flags(reducer, false, true);
    EXPECT_TRUE(caught<UsageError>([&] { reducer.begin_microbatch({.last = true}); }));
    EXPECT_TRUE(caught<UsageError>([&] { reducer.set_requires_gradient_sync(true, "unknown"); }));
    EXPECT_TRUE(caught<UsageError>([&] { reducer.set_requires_all_reduce(true, "unknown"); }));
    set_flags(reducer, true, true);
    run_microbatch(reducer, first, 0, mesh.rank(), {.last = true});
    static_cast<void>(reducer.shard("late"));
  });
}

INSTANTIATE_TEST_SUITE_P(Wire, Groups, testing::Values(Dtype::kF32, Dtype::kBf16, Dtype::kF16),
                         [](const auto& row) { return std::string(name(row.param)); });

TEST(LocalWindow, SendsNoMessageHoweverLongItIs) {
  const StepCase step =
      random_step({{.name = "w", .shape = {50}}}, 4, std::vector<Sync>(9, Sync::kNone), 3);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    register_all(reducer, step);
    std::vector<std::int64_t> messages;
    for (const int length : {0, 1, 2, 8}) {
      const std::int64_t before = reducer.stats().control_message_count;
      for (int m = 0; m < length; ++m) {
        run_microbatch(reducer, step, m, mesh.rank(), {.sync = Sync::kNone});
      }
      EXPECT_EQ(reducer.stats().control_message_count, before);
      run_microbatch(reducer, step, length, mesh.rank(), {.sync = Sync::kAll});
      static_cast<void>(reducer.found_inf());
      messages.push_back(reducer.stats().control_message_count - before);
    }
    EXPECT_EQ(messages, std::vector<std::int64_t>(4, 2)) << "one word, one bit";
  });
}

// A rank goes through its window while another one has not begun its own.
TEST(LocalWindow, WaitsForNobody) {
  for (const MeshShape shape : {MeshShape{1, 2}, MeshShape{2, 1}}) {
    const StepCase step = random_step({{.name = "w", .shape = {50}}}, 2,
                                      {Sync::kShard, Sync::kNone, Sync::kNone, Sync::kAll}, 3);
    std::vector<RankResult> results(2);
    std::latch through(1);
    run_mesh(shape, [&](const Mesh& mesh) {
      Reducer reducer(mesh);
      register_all(reducer, step);
      run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kShard});
      if (mesh.rank() == 0) through.wait();
      for (const int m : {1, 2}) {
        run_microbatch(reducer, step, m, mesh.rank(), {.sync = Sync::kNone});
      }
      if (mesh.rank() == 1) through.count_down();
      run_microbatch(reducer, step, 3, mesh.rank(), {.sync = Sync::kAll});
      results[static_cast<std::size_t>(mesh.rank())] = read_result(reducer, step);
    });
    expect_reference(results, step, {}, shape, "a window alone");
  }
}

}  // namespace
}  // namespace hsdp
