// Reducers that share a mesh, gradients that come late or from many threads: no deadlock, no
// mixing.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "hsdp/error.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary

std::vector<ParameterSpec> many_parameters(int count, Dtype dtype) {
  std::vector<ParameterSpec> specs;
  for (int p = 0; p < count; ++p) {
    specs.push_back({.name = "w" + std::to_string(p), .shape = {50 + p, 4}, .dtype = dtype});
  }
  return specs;
}

TEST(SeveralReducers, InterleaveOnOneMesh) {
  const StepCase first =
      random_step(many_parameters(9, Dtype::kF32), kSquare.size(), {Sync::kShard, Sync::kAll}, 1);
  const StepCase second =
      random_step(many_parameters(5, Dtype::kBf16), kSquare.size(), {Sync::kNone, Sync::kAll}, 2);
  std::vector<RankResult> first_results(4);
  std::vector<RankResult> second_results(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const auto rank = static_cast<std::size_t>(mesh.rank());
    Reducer a(mesh, {.bucket_bytes = 1 << 10});
    Reducer b(mesh, {.bucket_bytes = 1 << 9});
    register_all(a, first);
    register_all(b, second);
    for (int m = 0; m < 2; ++m) {
      const auto turn = static_cast<std::size_t>(m);
      a.begin_microbatch({.sync = first.schedule[turn]});
      b.begin_microbatch({.sync = second.schedule[turn]});
      const auto of_b = deliver(b, second, m, mesh.rank(), {.order = Order::kReverse});
      const auto of_a = deliver(a, first, m, mesh.rank(), {.order = Order::kRandom});
      a.end_microbatch();
      b.end_microbatch();
    }
    second_results[rank] = read_result(b, second);
    first_results[rank] = read_result(a, first);
  });
  expect_reference(first_results, first, {}, kSquare, "first");
  expect_reference(second_results, second, {}, kSquare, "second");
}

// One's blocks may close in another order than they were opened.
TEST(SeveralReducers, MayEndInTheOrderOfTheirOpening) {
  const StepCase step =
      random_step(many_parameters(4, Dtype::kF16), kSquare.size(), {Sync::kAll}, 3);
  constexpr std::size_t kReducerCount = 4;
  std::vector<std::vector<RankResult>> results(kReducerCount, std::vector<RankResult>(4));
  run_mesh(kSquare, [&](const Mesh& mesh) {
    std::vector<Reducer> reducers;
    for (std::size_t i = 0; i < kReducerCount; ++i) {
      reducers.emplace_back(mesh, ReducerOptions{.bucket_bytes = 1 << 9});
      register_all(reducers.back(), step);
    }
    std::vector<std::vector<StoredGradient>> stored;
    for (Reducer& reducer : reducers) reducer.begin_microbatch({.last = true});
    for (Reducer& reducer : reducers) stored.push_back(deliver(reducer, step, 0, mesh.rank()));
    for (Reducer& reducer : reducers) reducer.end_microbatch();
    for (std::size_t i = 0; i < kReducerCount; ++i) {
      results[i][static_cast<std::size_t>(mesh.rank())] = read_result(reducers[i], step);
    }
  });
  for (const auto& result : results) expect_reference(result, step, {}, kSquare, "one of four");
}

TEST(SeveralReducers, OneDropsItsStepTheOtherKeepsIts) {
  const StepCase step =
      random_step(many_parameters(4, Dtype::kF32), kSquare.size(), {Sync::kAll}, 4);
  std::vector<RankResult> kept(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer a(mesh, {.bucket_bytes = 1 << 9});
    Reducer b(mesh, {.bucket_bytes = 1 << 9});
    register_all(a, step);
    register_all(b, step);
    a.begin_microbatch({.last = true});
    b.begin_microbatch({.last = true});
    const auto of_b = deliver(b, step, 0, mesh.rank());
    if (mesh.rank() == 1) {
      a.abandon_step("rank 1 gives up on the first");
    } else {
      const auto of_a = deliver(a, step, 0, mesh.rank());
      a.end_microbatch();
      EXPECT_TRUE(caught<StepAbortedError>([&] { static_cast<void>(a.shard("w0")); }));
    }
    b.end_microbatch();
    kept[static_cast<std::size_t>(mesh.rank())] = read_result(b, step);
  });
  expect_reference(kept, step, {}, kSquare, "the other");
}

// Every rank holds back what the others send first, and the buckets that go first come last.
TEST(Arrival, LateBucketsFirstInADifferentOrderOnEveryRank) {
  const StepCase step = random_step(many_parameters(40, Dtype::kBf16), kSquare.size(),
                                    {Sync::kShard, Sync::kNone, Sync::kAll}, 5);
  for (const Order order : {Order::kReverse, Order::kRandom}) {
    for (const TransportChoice transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
      std::vector<RankResult> results(4);
      run_mesh(kSquare,
               [&](const Mesh& mesh) {
                 Reducer reducer(mesh, {.bucket_bytes = 256});
                 register_all(reducer, step);
                 results[static_cast<std::size_t>(mesh.rank())] =
                     run_step(reducer, step, mesh.rank(),
                              {.order = mesh.rank() == 0 ? Order::kForward : order, .seed = 3});
               },
               {.transport = transport});
      expect_reference(results, step, {}, kSquare, "late buckets first");
    }
  }
}

// gradient_ready returns although no peer has begun: it never waits for one.
TEST(Arrival, GradientReadyNeverWaitsForAPeer) {
  const StepCase step =
      random_step(many_parameters(30, Dtype::kF32), kSquare.size(), {Sync::kAll, Sync::kAll}, 6);
  std::vector<RankResult> results(4);
  std::atomic<bool> delivered{false};
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 256});
    register_all(reducer, step);
    run_microbatch(reducer, step, 0, mesh.rank(), {.last = true});
    static_cast<void>(reducer.shard("w0"));
    if (mesh.rank() != 0) {
      while (!delivered.load()) std::this_thread::yield();
    }
    reducer.begin_microbatch({.last = true});
    const auto stored = deliver(reducer, step, 1, mesh.rank());
    delivered.store(true);
    reducer.end_microbatch();
    results[static_cast<std::size_t>(mesh.rank())] = read_result(reducer, step);
  });
  StepCase second = step;
  second.schedule = {Sync::kAll};
  for (Gradients& gradients : second.gradients) gradients.erase(gradients.begin());
  expect_reference(results, second, {}, kSquare, "delivered alone");
}

TEST(Arrival, EightThreadsAndManyBuckets) {
  const StepCase step =
      random_step(many_parameters(64, Dtype::kF32), kSquare.size(), {Sync::kShard, Sync::kAll}, 7);
  std::vector<RankResult> results(4);
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 512});
    register_all(reducer, step);
    results[static_cast<std::size_t>(mesh.rank())] = run_step(
        reducer, step, mesh.rank(), {.order = Order::kRandom, .thread_count = 8, .seed = 11});
  });
  expect_reference(results, step, {}, kSquare, "eight threads");
}

}  // namespace
}  // namespace hsdp
