// Several Reducers on one mesh, gradients that come late or from many threads: no deadlock, and no
// mix-up.
#include <gtest/gtest.h>

#include <latch>

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

// The block that was opened first closes first.
TEST(SeveralReducers, InterleaveOnOneMesh) {
  const StepCase first =
      random_step(many_parameters(9, Dtype::kF32), kSquare.size(), {Sync::kShard, Sync::kAll}, 1);
  const StepCase second =
      random_step(many_parameters(5, Dtype::kBf16), kSquare.size(), {Sync::kNone, Sync::kAll}, 2);
  run_mesh(kSquare, [&](const Mesh& mesh) {
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
    expect_same_bits(gathered(b, second), reference_results(second, {}, kSquare), "second");
    expect_same_bits(gathered(a, first), reference_results(first, {}, kSquare), "first");
  });
}

TEST(SeveralReducers, OneDropsItsStepTheOtherKeepsIts) {
  const StepCase step =
      random_step(many_parameters(4, Dtype::kF32), kSquare.size(), {Sync::kAll}, 4);
  const ReducerOptions options{.bucket_bytes = 1 << 9};
  expect_result(kSquare, step, options, [&](Reducer& kept, const Mesh& mesh) {
    Reducer dropped(mesh, options);
    register_all(dropped, step);
    dropped.begin_microbatch({.last = true});
    kept.begin_microbatch({.last = true});
    const auto of_kept = deliver(kept, step, 0, mesh.rank());
    if (mesh.rank() == 1) {
      dropped.abandon_step("rank 1 gives up on this one");
    } else {
      const auto of_dropped = deliver(dropped, step, 0, mesh.rank());
      dropped.end_microbatch();
      EXPECT_THROW(static_cast<void>(dropped.shard("w0")), StepAbortedError);
    }
    kept.end_microbatch();
  });
}

// Every rank holds back what the other ranks send first, so the buckets due first come last.
TEST(Arrival, LateBucketsFirstInADifferentOrderOnEveryRank) {
  const StepCase step = random_step(many_parameters(40, Dtype::kBf16), kSquare.size(),
                                    {Sync::kShard, Sync::kNone, Sync::kAll}, 5);
  for (const Order order : {Order::kReverse, Order::kRandom}) {
    for (const int thread_count : {1, 8}) {
      for (const TransportChoice transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
        const auto run = [&](Reducer& reducer, const Mesh& mesh) {
          run_step(reducer, step, mesh.rank(),
                   {.order = mesh.rank() == 0 ? Order::kForward : order,
                    .thread_count = thread_count,
                    .seed = 3});
        };
        expect_result(kSquare, step, {.bucket_bytes = 256}, run, {.transport = transport});
      }
    }
  }
}

// gradient_ready returns although no peer has begun: it never waits for a peer.
TEST(Arrival, GradientReadyNeverWaitsForAPeer) {
  const StepCase before =
      random_step(many_parameters(30, Dtype::kF32), kSquare.size(), {Sync::kAll}, 5);
  const StepCase step = random_step(before.parameters, kSquare.size(), {Sync::kAll}, 6);
  std::latch delivered(1);
  expect_result(kSquare, step, {.bucket_bytes = 256}, [&](Reducer& reducer, const Mesh& mesh) {
    run_step(reducer, before, mesh.rank());
    if (mesh.rank() != 0) delivered.wait();
    reducer.begin_microbatch({.last = true});
    const auto stored = deliver(reducer, step, 0, mesh.rank());
    if (mesh.rank() == 0) delivered.count_down();
    reducer.end_microbatch();
  });
}

}  // namespace
}  // namespace hsdp
