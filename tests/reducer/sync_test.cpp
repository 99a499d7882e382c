// Which sync a microbatch runs: explicit, last, flags; and flags per group.
#include <gtest/gtest.h>

#include <latch>
#include <ostream>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

// What the last microbatch left: a result, a readable carry, or local sums only.
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
  run_reducers(kSquare, step, {.bucket_bytes = 64}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.set_requires_gradient_sync(row.gradient_sync);
    reducer.set_requires_all_reduce(row.all_reduce);
    if (!row.want) {
      EXPECT_THROW(reducer.begin_microbatch(row.options), UsageError);
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

// Two groups with different flags: "late" synchronizes less often. random_steps_test.cpp covers
// their schedules.
StepCase step_of_groups(int microbatch_count, std::uint64_t seed = 4) {
  return random_step({{.name = "late", .shape = {130, 3}, .group = "late"},
                      {.name = "early", .shape = {301}, .group = "early"}},
                     kSquare.size(),
                     std::vector<Sync>(static_cast<std::size_t>(microbatch_count), Sync::kAll),
                     seed);
}

void set_late(Reducer& reducer, bool sync, bool all_reduce) {
  reducer.set_requires_gradient_sync(sync, "late");
  reducer.set_requires_all_reduce(all_reduce, "late");
}

TEST(Groups, LastEndsTheStepForAllOfThem) {
  StepCase step = step_of_groups(2);
  step.schedule[0] = Sync::kShard;
  StepCase early = step;
  early.schedule[0] = Sync::kAll;
  const ReducerOptions options{.reduce_dtype = Dtype::kF16, .bucket_bytes = 512};
  std::vector<Values> want = reference_results(step, options, kSquare);
  want[1] = reference_results(early, options, kSquare)[1];
  run_reducers(kSquare, step, options, [&](Reducer& reducer, const Mesh& mesh) {
    set_late(reducer, true, false);
    run_microbatch(reducer, step, 0, mesh.rank(), {});
    EXPECT_GT(reducer.stats().total_bytes, 0) << "of the early group";
    run_microbatch(reducer, step, 1, mesh.rank(), {.last = true});
    expect_same_bits(gathered(reducer, step), want, "late and early");
  });
}

TEST(Groups, DiscardDropsTotalsToo) {
  const StepCase dropped = step_of_groups(1, 5);
  const StepCase step = step_of_groups(1);
  expect_result(kSquare, step, {.bucket_bytes = 512}, [&](Reducer& reducer, const Mesh& mesh) {
    set_late(reducer, true, false);
    run_microbatch(reducer, dropped, 0, mesh.rank(), {});
    reducer.discard();
    set_late(reducer, true, true);
    run_microbatch(reducer, step, 0, mesh.rank(), {});
  });
}

TEST(Groups, CountTheirOwnBuckets) {
  const StepCase step = step_of_groups(1);
  run_reducers(kSquare, step, {.bucket_bytes = 512}, [&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, step, mesh.rank());
    const ReducerStats whole = reducer.stats();
    set_late(reducer, false, true);
    run_microbatch(reducer, step, 0, mesh.rank(), {});
    reducer.discard();
    const ReducerStats after = reducer.stats();
    const auto early = after.reduce_scatter_count - whole.reduce_scatter_count;
    EXPECT_GT(early, 0);
    EXPECT_LT(early, whole.bucket_count);
    EXPECT_EQ(after.all_reduce_count - whole.all_reduce_count, early);
  });
}

TEST(Groups, LastWithTheSyncOfOneOffIsAnError) {
  const StepCase step = step_of_groups(1);
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    set_late(reducer, false, true);
    EXPECT_THROW(reducer.begin_microbatch({.last = true}), UsageError);
    EXPECT_THROW(reducer.set_requires_gradient_sync(true, "unknown"), UsageError);
    EXPECT_THROW(reducer.set_requires_all_reduce(true, "unknown"), UsageError);
    set_late(reducer, true, true);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
    static_cast<void>(reducer.shard("late"));
  });
}

TEST(LocalWindow, SendsNoMessageHoweverLongItIs) {
  const StepCase step =
      random_step({{.name = "w", .shape = {50}}}, 4, std::vector<Sync>(9, Sync::kNone), 3);
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    std::vector<std::int64_t> messages;
    reducer.prepare();
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

// One rank goes through its window while another one has not begun its own.
TEST(LocalWindow, WaitsForNobody) {
  for (const MeshShape shape : {MeshShape{1, 2}, MeshShape{2, 1}}) {
    const StepCase step = random_step({{.name = "w", .shape = {50}}}, 2,
                                      {Sync::kShard, Sync::kNone, Sync::kNone, Sync::kAll}, 3);
    std::latch through(1);
    expect_result(shape, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
      run_microbatch(reducer, step, 0, mesh.rank(), {.sync = Sync::kShard});
      if (mesh.rank() == 0) through.wait();
      for (const int m : {1, 2}) {
        run_microbatch(reducer, step, m, mesh.rank(), {.sync = Sync::kNone});
      }
      if (mesh.rank() == 1) through.count_down();
      run_microbatch(reducer, step, 3, mesh.rank(), {.sync = Sync::kAll});
    });
  }
}

}  // namespace
}  // namespace hsdp
