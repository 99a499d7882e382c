// The states of a Reducer: what may be called when, and that nothing leaks into the next step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

#include "hsdp/error.h"
#include "hsdp/reducer_internal.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::HasSubstr;

std::vector<ParameterSpec> lasting_parameters() {
  return {{.name = "w", .shape = {90, 3}}, {.name = "b", .shape = {31}, .dtype = Dtype::kBf16}};
}

StepCase a_step(std::vector<Sync> schedule, std::uint64_t seed) {
  return random_step(lasting_parameters(), kSquare.size(), std::move(schedule), seed);
}

// Runs `before` and then a clean step through the same Reducer; the clean step must be right.
void expect_no_leak(const ReducerBody& before) {
  const StepCase clean = a_step({Sync::kNone, Sync::kShard, Sync::kAll}, 21);
  expect_result(kSquare, clean, {.bucket_bytes = 256}, [&](Reducer& reducer, const Mesh& mesh) {
    before(reducer, mesh);
    run_step(reducer, clean, mesh.rank());
  });
}

TEST(Finish, KeepsTheResultOfACompleteStep) {
  for (const bool finish : {false, true}) {
    StepCase step = a_step({Sync::kShard, finish ? Sync::kNone : Sync::kAll}, 1);
    step.finish = finish;
    expect_result(kSquare, step, {.bucket_bytes = 256}, [&](Reducer& reducer, const Mesh& mesh) {
      run_step(reducer, step, mesh.rank());
      reducer.finish();
    });
  }
}

TEST(Finish, WithNothingPendingDoesNothing) {
  expect_no_leak([](Reducer& reducer, const Mesh&) {
    reducer.finish();
    reducer.finish();
    EXPECT_EQ(reducer.stats().reduce_scatter_count, 0);
    EXPECT_EQ(reducer.stats().step_count, 0);
  });
}

TEST(Discard, DropsWhateverIsPendingOrFinished) {
  for (const std::vector<Sync>& schedule : {std::vector<Sync>{Sync::kShard},
                                            {Sync::kNone},
                                            {Sync::kNone, Sync::kShard},
                                            {Sync::kShard, Sync::kNone},
                                            {Sync::kShard, Sync::kAll}}) {
    const StepCase step = a_step(schedule, 3);
    const int ended = schedule.back() == Sync::kAll ? 1 : 0;
    expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
      run_schedule(reducer, step, mesh.rank());
      reducer.discard();
      EXPECT_THROW(static_cast<void>(reducer.shard("w")), UsageError);
      reducer.discard();
      reducer.finish();
      const ReducerStats stats = reducer.stats();
      EXPECT_EQ(stats.all_reduce_count, ended * stats.bucket_count);
      EXPECT_EQ(stats.step_count, ended);
    });
  }
}

// With neither last nor sync, the caller means a second microbatch of the same step.
TEST(UnreadResult, IsNotLostToAMicrobatchThatSaysNothing) {
  const StepCase step = a_step({Sync::kAll}, 4);
  const std::vector<std::function<void(Reducer&)>> reads{
      [](Reducer& reducer) { static_cast<void>(reducer.shard("w")); },
      [](Reducer& reducer) { static_cast<void>(reducer.grad_norm()); },
      [](Reducer& reducer) { static_cast<void>(reducer.clip_grad_norm(1.0)); },
      [](Reducer& reducer) { static_cast<void>(reducer.found_inf()); },
      [](Reducer& reducer) { reducer.gather_gradients({}); },
      [](Reducer& reducer) { reducer.discard(); }};
  expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
    const auto microbatch = [&](const MicrobatchOptions& options) {
      run_microbatch(reducer, step, 0, mesh.rank(), options);
    };
    for (const auto& read : reads) {
      microbatch({});
      read(reducer);
    }
    microbatch({});
    EXPECT_THAT(caught<UsageError>([&] { microbatch({}); }), says(HasSubstr("discard()")));
    microbatch({});  // all ranks have dropped the step of that microbatch
    microbatch({.last = true});
    microbatch({.sync = Sync::kAll});
    reducer.set_requires_all_reduce(true);
    microbatch({});
    microbatch({});
  });
}

TEST(UnreadResult, OnOneRankDropsTheStepOfAll) {
  const StepCase step = a_step({Sync::kAll}, 4);
  expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
    run_microbatch(reducer, step, 0, mesh.rank(), {});
    const bool reads = mesh.rank() != 2;
    if (reads) static_cast<void>(reducer.shard("w"));
    const auto next = [&] {
      run_microbatch(reducer, step, 0, mesh.rank(), {});
      static_cast<void>(reducer.shard("w"));
    };
    if (reads) {
      EXPECT_THROW(next(), StepAbortedError);
    } else {
      EXPECT_THROW(next(), UsageError);
    }
  });
}

TEST(Steps, FollowEachOtherWithoutReadingTheResult) {
  const StepCase unread = a_step({Sync::kShard, Sync::kAll}, 4);
  expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
    for (int i = 0; i < 5; ++i) run_schedule(reducer, unread, mesh.rank());
  });
}

TEST(Shard, IsReadableOnlyWhileAResultStands) {
  const StepCase step = a_step({Sync::kShard, Sync::kAll}, 5);
  run_reducers(kSquare, step, {.bucket_bytes = 256}, [&](Reducer& reducer, const Mesh& mesh) {
    const auto read = [&] { static_cast<void>(reducer.shard("w")); };
    EXPECT_THROW(read(), UsageError) << "before the first step";
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    EXPECT_THROW(read(), UsageError) << "a carry is pending";
    reducer.begin_microbatch({.last = true});
    EXPECT_THROW(read(), UsageError) << "inside a microbatch";
    const auto stored = deliver(reducer, step, 1, mesh.rank());
    reducer.end_microbatch();
    read();
    read();
    EXPECT_THROW(static_cast<void>(reducer.shard("unknown")), UsageError);
    reducer.begin_microbatch({.last = true});
    EXPECT_THROW(read(), UsageError) << "the next step has begun";
    reducer.abandon_step("end of the test");
  });
}

TEST(Shard, IsTheResultItselfAndMayBeWritten) {
  const StepCase step = a_step({Sync::kAll}, 6);
  expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, step, mesh.rank());
    const TensorView view = reducer.shard("w");
    ASSERT_GT(view.count, 0);
    static_cast<float*>(view.data)[0] = 42.0F;
    EXPECT_EQ(reducer.shard("w").data, view.data);
    EXPECT_EQ(values_of(reducer.shard("w")).front(), 42.0F);
  });
}

TEST(PartialShard, ReadsACopyOfTheCarryOnly) {
  const StepCase step = a_step({Sync::kShard, Sync::kShard}, 7);
  run_reducers(kSquare, step, {.bucket_bytes = 256}, [&](Reducer& reducer, const Mesh& mesh) {
    run_schedule(reducer, step, mesh.rank());
    const Values whole =
        reference_partial(reference_step(step, {}, kSquare, 0), step.gradients[0], mesh.replica());
    const Slice slice = reducer.slice("w");
    const Values want(whole.begin() + slice.offset, whole.begin() + slice.offset + slice.count);
    for (const std::string read : {"first", "second"}) {  // reading divides a copy
      expect_same_bits(reducer.partial_shard("w"), want, read);
    }
    EXPECT_THROW(static_cast<void>(reducer.partial_shard("unknown")), UsageError);
    reducer.discard();
  });
}

TEST(PartialShard, OfUnreducedMicrobatchesNamesFinish) {
  const StepCase step = a_step({Sync::kShard, Sync::kNone}, 8);
  expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
    run_schedule(reducer, step, mesh.rank());
    EXPECT_THAT(caught<UsageError>([&] { static_cast<void>(reducer.partial_shard("w")); }),
                says(HasSubstr("finish()")));
    EXPECT_THAT(caught<UsageError>([&] { reducer.save_snapshot("/nonexistent/snapshot", 1); }),
                says(HasSubstr("finish()")));
    reducer.finish();
    static_cast<void>(reducer.shard("w"));
  });
}

TEST(CallOrder, InsideAMicrobatchIsCheckedAndHarmless) {
  const StepCase step = a_step({Sync::kAll}, 9);
  expect_result(kSquare, step, {.bucket_bytes = 256}, [&](Reducer& reducer, const Mesh& mesh) {
    const StoredGradient gradient = gradient_of(step, 0, 0, 0);
    EXPECT_THROW(reducer.gradient_ready("w", gradient.view()), UsageError);
    EXPECT_THROW(reducer.end_microbatch(), UsageError);
    reducer.begin_microbatch({.last = true});
    EXPECT_THROW(reducer.begin_microbatch({.last = true}), UsageError);
    EXPECT_THROW(reducer.finish(), UsageError);
    EXPECT_THROW(reducer.discard(), UsageError);
    EXPECT_THROW(static_cast<void>(reducer.grad_norm()), UsageError);
    EXPECT_THROW(static_cast<void>(reducer.found_inf()), UsageError);
    EXPECT_THROW(static_cast<void>(reducer.partial_shard("w")), UsageError);
    EXPECT_THROW(reducer.register_parameter({.name = "late", .shape = {1}}), UsageError);
    EXPECT_THROW(reducer.set_requires_gradient_sync(false), UsageError);
    const auto stored = deliver(reducer, step, 0, mesh.rank());
    reducer.end_microbatch();
  });
}

TEST(Registration, RefusesWhatCannotBeReduced) {
  run_mesh({1, 1}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    EXPECT_EQ(reducer.register_parameter({.name = "a", .shape = {2}}), 0);
    EXPECT_EQ(reducer.register_parameter({.name = "b", .shape = {}}), 1);
    for (const ParameterSpec& bad :
         std::vector<ParameterSpec>{{.name = "a", .shape = {3}},
                                    {.name = "c", .shape = {-1}},
                                    {.name = "", .shape = {1}},
                                    {.name = std::string(4097, 'c'), .shape = {1}},
                                    {.name = "\xff", .shape = {1}},
                                    {.name = "c", .shape = {std::int64_t{1} << 58}},
                                    {.name = "c", .shape = {std::int64_t{1} << 32, 1LL << 32}},
                                    {.name = "c", .shape = Shape(33, 1)},  // of a snapshot's 32
                                    {.name = "c", .shape = {1}, .dtype = Dtype::kI64},
                                    {.name = "c", .shape = {1}, .dtype = Dtype::kU8},
                                    {.name = "c", .shape = {1}, .reduce_dtype = Dtype::kF64},
                                    {.name = "c", .shape = {2, 3}, .is_complex = true},
                                    {.name = "c", .shape = {}, .is_complex = true}}) {
      EXPECT_THROW(reducer.register_parameter(bad), UsageError) << bad.name;
    }
    EXPECT_EQ(reducer.register_parameter({.name = "deep", .shape = Shape(32, 1)}), 2);
    ASSERT_EQ(reducer.parameters().size(), 3U);
    EXPECT_EQ(reducer.parameters()[1].name, "b");
  });
}

TEST(MicrobatchGuard, EndsOnce) {
  const StepCase step = random_step({{.name = "w", .shape = {5}}}, 1, {Sync::kAll}, 1);
  run_reducers({}, step, {}, [&](Reducer& reducer, const Mesh&) {
    Microbatch open(reducer, {.last = true});
    const auto stored = deliver(reducer, step, 0, 0);
    open.end();
    EXPECT_THROW(open.end(), UsageError);
    static_cast<void>(reducer.shard("w"));
  });
}

TEST(HasGradient, RefusesAnIndexThatThereIsNot) {
  run_mesh({}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {5}});
    EXPECT_FALSE(ReducerInternal(reducer).has_gradient(0));
    for (const int parameter : {-1, 1}) {
      EXPECT_THAT(caught<UsageError>(
                      [&] { static_cast<void>(ReducerInternal(reducer).has_gradient(parameter)); }),
                  says("reducer: has_gradient: expected a parameter index below 1, got " +
                       std::to_string(parameter)));
    }
  });
}

TEST(Registration, RefusesBadOptions) {
  run_mesh({1, 1}, [](const Mesh& mesh) {
    for (const ReducerOptions& bad :
         {ReducerOptions{.reduce_dtype = Dtype::kF64}, ReducerOptions{.replica_dtype = Dtype::kU8},
          ReducerOptions{.bucket_bytes = 0}, ReducerOptions{.bucket_bytes = -5},
          ReducerOptions{.reduction = "fast"}, ReducerOptions{.reduction = "native"},
          ReducerOptions{.replica_hop = std::make_shared<PlainHop>(Dtype::kF64)},
          ReducerOptions{.replica_dtype = Dtype::kF32,
          .replica_hop = std::make_shared<PlainHop>(Dtype::kBf16)}}) {
      EXPECT_THROW(Reducer(mesh, bad), UsageError);
    }
  });
}

TEST(Close, AllowsNothingButStatsAndCloseAfterwards) {
  const StepCase step = a_step({Sync::kAll}, 10);
  run_reducers(kSquare, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, step, mesh.rank());
    reducer.close();
    reducer.close();
    EXPECT_EQ(reducer.stats().step_count, 1);
    EXPECT_THROW(static_cast<void>(reducer.shard("w")), UsageError);
    EXPECT_THROW(reducer.begin_microbatch({.last = true}), UsageError);
    EXPECT_THROW(reducer.finish(), UsageError);
  });
}

TEST(Close, ByDestructionWithAStepPendingDoesNotHang) {
  const StepCase step = a_step({Sync::kShard}, 11);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    for (const bool last : {false, true}) {
      Reducer reducer(mesh, {.bucket_bytes = 256});
      register_all(reducer, step);
      run_microbatch(reducer, step, 0, mesh.rank(), {.last = last});
      Reducer moved = std::move(reducer);
      if (last) static_cast<void>(moved.shard("w"));
    }
  });
}

TEST(ReducerTimes, AreLongWhereARankWaitsForAnother) {
  const MeshShape pair{.replicate = 1, .shard = 2};
  const StepCase step = random_step(odd_parameters(Dtype::kF32), 2, {Sync::kAll}, 4);
  run_reducers(pair, step, {}, [&](Reducer& reducer, const Mesh& mesh) {
    reducer.prepare();
    EXPECT_EQ(reducer.stats().shard_hop_s, 0);
    EXPECT_EQ(reducer.stats().pack_s, 0);
    if (mesh.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    static_cast<void>(run_step(reducer, step, mesh.rank()));
    EXPECT_EQ(reducer.stats().gather_s, 0);
    static_cast<void>(gathered(reducer, step));
    const ReducerStats stats = reducer.stats();
    EXPECT_GT(stats.pack_s, 0);
    EXPECT_GT(stats.gather_s, 0);
    EXPECT_EQ(stats.replica_hop_s, 0);
    EXPECT_EQ(stats.update_s, 0);
    if (mesh.rank() == 1) return;
    EXPECT_GE(stats.shard_hop_s, 0.1);
    EXPECT_GE(stats.waiting_s, 0.1);
    EXPECT_LT(stats.pack_s, stats.waiting_s);
  });
}

}  // namespace
}  // namespace hsdp
