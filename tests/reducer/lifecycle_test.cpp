// The states of a Reducer: what may be called when, and that nothing leaks into the next step.
#include <gtest/gtest.h>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

std::vector<ParameterSpec> lasting_parameters() {
  return {{.name = "w", .shape = {90, 3}}, {.name = "b", .shape = {31}, .dtype = Dtype::kBf16}};
}

StepCase a_step(std::vector<Sync> schedule, std::uint64_t seed) {
  return random_step(lasting_parameters(), kSquare.size(), std::move(schedule), seed);
}

// Runs `before` and then a clean step through the same Reducer; the clean step must be right.
void expect_no_leak(const std::function<void(Reducer&, const Mesh&)>& before) {
  const StepCase clean = a_step({Sync::kNone, Sync::kShard, Sync::kAll}, 21);
  std::vector<RankResult> results(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 256});
    register_all(reducer, clean);
    before(reducer, mesh);
    results[static_cast<std::size_t>(mesh.rank())] = run_step(reducer, clean, mesh.rank());
  });
  expect_reference(results, clean, {}, kSquare, "the next step");
}

TEST(Finish, CompletesAPendingCarryAndIsSafeTwice) {
  const StepCase pending = a_step({Sync::kShard, Sync::kNone}, 1);
  StepCase finished = pending;
  finished.finish = true;
  std::vector<RankResult> results(4);
  std::vector<RankResult> again(4);
  expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
    const auto rank = static_cast<std::size_t>(mesh.rank());
    results[rank] = run_step(reducer, finished, mesh.rank());
    reducer.finish();
    again[rank] = read_result(reducer, pending);
  });
  expect_reference(results, finished, {}, kSquare, "finished");
  expect_reference(again, finished, {}, kSquare, "finished twice");
}

TEST(Finish, WithNothingPendingDoesNothing) {
  expect_no_leak([](Reducer& reducer, const Mesh&) {
    reducer.finish();
    reducer.finish();
    EXPECT_EQ(reducer.stats().reduce_scatter_count, 0);
    EXPECT_EQ(reducer.stats().step_count, 0);
  });
}

TEST(Finish, KeepsTheResultOfACompleteStep) {
  const StepCase complete = a_step({Sync::kAll}, 2);
  std::vector<RankResult> results(4);
  expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, complete, mesh.rank());
    reducer.finish();
    results[static_cast<std::size_t>(mesh.rank())] = read_result(reducer, complete);
  });
  expect_reference(results, complete, {}, kSquare, "complete");
}

TEST(Discard, DropsWhateverIsPending) {
  for (const std::vector<Sync>& schedule : {std::vector<Sync>{Sync::kShard},
                                            {Sync::kNone},
                                            {Sync::kNone, Sync::kShard},
                                            {Sync::kShard, Sync::kNone}}) {
    const StepCase pending = a_step(schedule, 3);
    expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
      for (std::size_t m = 0; m < schedule.size(); ++m) {
        run_microbatch(reducer, pending, static_cast<int>(m), mesh.rank(), {.sync = schedule[m]});
      }
      reducer.discard();
      EXPECT_TRUE(caught<UsageError>([&] { static_cast<void>(reducer.shard("w")); }));
      reducer.discard();
      reducer.finish();
      EXPECT_EQ(reducer.stats().all_reduce_count, 0);
    });
  }
}

TEST(Discard, DropsAFinishedResultToo) {
  const StepCase complete = a_step({Sync::kShard, Sync::kAll}, 2);
  expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, complete, mesh.rank());
    reducer.discard();
    EXPECT_TRUE(caught<UsageError>([&] { static_cast<void>(reducer.shard("w")); }));
    EXPECT_EQ(reducer.stats().step_count, 1);
  });
}

// Neither last nor sync: what was meant is a second microbatch of the same step.
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
    const auto error = caught<UsageError>([&] { microbatch({}); });
    ASSERT_TRUE(error);
    EXPECT_NE(std::string(error->what()).find("discard()"), std::string::npos) << error->what();
    microbatch({});  // the step of that microbatch was dropped, on all ranks
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
      EXPECT_TRUE(caught<StepAbortedError>(next));
    } else {
      EXPECT_TRUE(caught<UsageError>(next));
    }
  });
}

TEST(Steps, FollowEachOtherWithoutReadingTheResult) {
  const StepCase unread = a_step({Sync::kShard, Sync::kAll}, 4);
  expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
    for (int i = 0; i < 5; ++i) {
      for (int m = 0; m < 2; ++m) {
        run_microbatch(reducer, unread, m, mesh.rank(), {.last = m == 1});
      }
    }
  });
}

TEST(Shard, IsReadableOnlyWhileAResultStands) {
  const StepCase step = a_step({Sync::kShard, Sync::kAll}, 5);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 256});
    register_all(reducer, step);
    const auto refused = [&] {
      return caught<UsageError>([&] { static_cast<void>(reducer.shard("w")); }).has_value();
    };
    EXPECT_TRUE(refused()) << "before the first step";
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    EXPECT_TRUE(refused()) << "a carry is pending";
    reducer.begin_microbatch({.last = true});
    EXPECT_TRUE(refused()) << "inside a microbatch";
    const auto stored = deliver(reducer, step, 1, mesh.rank());
    reducer.end_microbatch();
    EXPECT_FALSE(refused());
    EXPECT_FALSE(refused()) << "twice";
    EXPECT_TRUE(caught<UsageError>([&] { static_cast<void>(reducer.shard("unknown")); }));
    reducer.begin_microbatch({.last = true});
    EXPECT_TRUE(refused()) << "the next step has begun";
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
  std::vector<Values> partials(4);
  std::vector<Slice> slices(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 256});
    register_all(reducer, step);
    const auto rank = static_cast<std::size_t>(mesh.rank());
    for (int m = 0; m < 2; ++m) run_microbatch(reducer, step, m, mesh.rank(), {.last = false});
    partials[rank] = reducer.partial_shard("w");
    slices[rank] = reducer.slice("w");
    EXPECT_EQ(reducer.partial_shard("w"), partials[rank]) << "reading divides a copy";
    EXPECT_TRUE(caught<UsageError>([&] { static_cast<void>(reducer.partial_shard("unknown")); }));
    reducer.discard();
  });
  for (int replica = 0; replica < 2; ++replica) {
    const Values want =
        reference_partial(reference_step(step, {}, kSquare, 0), step.gradients[0], replica);
    Values got;
    for (std::size_t s = 0; s < 2; ++s) {
      const std::size_t rank = static_cast<std::size_t>(replica) * 2 + s;
      EXPECT_EQ(slices[rank].offset, static_cast<std::int64_t>(got.size()));
      got.insert(got.end(), partials[rank].begin(), partials[rank].end());
    }
    expect_same_bits(got, want, "partial of replica " + std::to_string(replica));
  }
}

TEST(PartialShard, OfUnreducedMicrobatchesNamesFinish) {
  const StepCase step = a_step({Sync::kShard, Sync::kNone}, 8);
  expect_no_leak([&](Reducer& reducer, const Mesh& mesh) {
    for (int m = 0; m < 2; ++m) {
      run_microbatch(reducer, step, m, mesh.rank(),
                     {.sync = step.schedule[static_cast<std::size_t>(m)]});
    }
    for (const auto& read : std::vector<std::function<void()>>{
             [&] { static_cast<void>(reducer.partial_shard("w")); },
             [&] { reducer.save_snapshot("/nonexistent/snapshot", 1); }}) {
      const auto error = caught<UsageError>(read);
      ASSERT_TRUE(error);
      EXPECT_NE(std::string(error->what()).find("finish()"), std::string::npos) << error->what();
    }
    reducer.finish();
    static_cast<void>(reducer.shard("w"));
  });
}

TEST(CallOrder, InsideAMicrobatchIsCheckedAndHarmless) {
  const StepCase step = a_step({Sync::kAll}, 9);
  std::vector<RankResult> results(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 256});
    register_all(reducer, step);
    const StoredGradient gradient(*step.gradients[0][0][0], {90, 3}, Dtype::kF32);
    EXPECT_TRUE(caught<UsageError>([&] { reducer.gradient_ready("w", gradient.view()); }));
    EXPECT_TRUE(caught<UsageError>([&] { reducer.end_microbatch(); }));
    reducer.begin_microbatch({.last = true});
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { reducer.begin_microbatch({.last = true}); }, [&] { reducer.finish(); },
             [&] { reducer.discard(); }, [&] { static_cast<void>(reducer.grad_norm()); },
             [&] { static_cast<void>(reducer.found_inf()); },
             [&] { static_cast<void>(reducer.partial_shard("w")); },
             [&] { reducer.register_parameter({.name = "late", .shape = {1}}); }}) {
      EXPECT_TRUE(caught<UsageError>(call));
    }
    const auto stored = deliver(reducer, step, 0, mesh.rank());
    reducer.end_microbatch();
    results[static_cast<std::size_t>(mesh.rank())] = read_result(reducer, step);
  });
  expect_reference(results, step, {}, kSquare, "after refused calls");
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
                                    {.name = "c", .shape = {1}, .dtype = Dtype::kF64},
                                    {.name = "c", .shape = {1}, .dtype = Dtype::kU8},
                                    {.name = "c", .shape = {1}, .reduce_dtype = Dtype::kI64}}) {
      EXPECT_TRUE(caught<UsageError>([&] { reducer.register_parameter(bad); })) << bad.name;
    }
    EXPECT_EQ(reducer.register_parameter({.name = "deep", .shape = Shape(32, 1)}), 2);
    ASSERT_EQ(reducer.parameters().size(), 3U);
    EXPECT_EQ(reducer.parameters()[1].name, "b");
  });
}

// Everything would be zero, or infinite, without a word.
TEST(Divisor, OutsideTheRangeOfFp32IsRefused) {
  run_mesh({1, 1}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    for (const double factor : {1e300, 1e39, 1e-300, 1e-45}) {
      EXPECT_TRUE(caught<UsageError>([&] { reducer.set_gradient_divide_factor(factor); }))
          << factor;
    }
    reducer.set_gradient_divide_factor(1e30);
    EXPECT_TRUE(caught<UsageError>([&] { reducer.set_loss_scale(1e30); }));
    reducer.set_loss_scale(65536);
    EXPECT_TRUE(caught<UsageError>([&] { reducer.set_gradient_divide_factor(1e34); }));
  });
}

TEST(MicrobatchGuard, EndsOnce) {
  const StepCase step = random_step({{.name = "w", .shape = {5}}}, 1, {Sync::kAll}, 1);
  run_mesh({1, 1}, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    register_all(reducer, step);
    Microbatch open(reducer, {.last = true});
    const auto stored = deliver(reducer, step, 0, 0);
    open.end();
    EXPECT_TRUE(caught<UsageError>([&] { open.end(); }));
    static_cast<void>(reducer.shard("w"));
  });
}

TEST(HasGradient, RefusesAnIndexThatThereIsNot) {
  run_mesh({1, 1}, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    reducer.register_parameter({.name = "w", .shape = {5}});
    EXPECT_FALSE(reducer.has_gradient(0));
    for (const int parameter : {-1, 1}) {
      const auto error =
          caught<UsageError>([&] { static_cast<void>(reducer.has_gradient(parameter)); });
      ASSERT_TRUE(error);
      EXPECT_EQ(std::string(error->what()),
                "reducer: has_gradient: expected a parameter index below 1, got " +
                    std::to_string(parameter));
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
      EXPECT_TRUE(caught<UsageError>([&] { const Reducer reducer(mesh, bad); }));
    }
  });
}

TEST(Close, AllowsNothingButStatsAndCloseAfterwards) {
  const StepCase step = a_step({Sync::kAll}, 10);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh);
    register_all(reducer, step);
    run_step(reducer, step, mesh.rank());
    reducer.close();
    reducer.close();
    EXPECT_EQ(reducer.stats().step_count, 1);
    EXPECT_TRUE(caught<UsageError>([&] { static_cast<void>(reducer.shard("w")); }));
    EXPECT_TRUE(caught<UsageError>([&] { reducer.begin_microbatch({.last = true}); }));
    EXPECT_TRUE(caught<UsageError>([&] { reducer.finish(); }));
  });
}

TEST(Close, ByDestructionWithAStepPendingDoesNotHang) {
  const StepCase step = a_step({Sync::kShard}, 11);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    {
      Reducer reducer(mesh, {.bucket_bytes = 256});
      register_all(reducer, step);
      run_microbatch(reducer, step, 0, mesh.rank(), {.last = false});
    }
    Reducer next(mesh);
    register_all(next, step);
    run_microbatch(next, step, 0, mesh.rank(), {.last = true});
    Reducer moved = std::move(next);
    static_cast<void>(moved.shard("w"));
  });
}

}  // namespace
}  // namespace hsdp
