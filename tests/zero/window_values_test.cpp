// The bits of windows: those of local microbatches with the same gradients, whatever is declared,
// in whatever order and on however many threads gradients come, and whichever rank has more of
// them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/reducer_step.h"
#include "zero/coalesced_window.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using zero::CoalescedWindow;

// Consecutive microbatches [first, end) of a step as one window.
struct Passes {
  int first = 0;
  int end = 0;
};

void run_window(Reducer& reducer, const StepCase& step, Passes passes, int rank,
                const WindowOptions& options, const Delivery& delivery = {}) {
  CoalescedWindow window({&reducer}, options);
  for (int m = passes.first; m < passes.end; ++m) {
    std::vector<StoredGradient> stored = deliver(reducer, step, m, rank, delivery);
    // The gradient is in the local sum.
    for (StoredGradient& gradient : stored) gradient.poison();
  }
  window.end();
}

// Each pass adds; what the window sends is what finish() would.
StepCase passes_of_one_window(const std::vector<ParameterSpec>& parameters, int world_size,
                              int pass_count, std::uint64_t seed) {
  StepCase step =
      random_step(parameters, world_size,
                  std::vector<Sync>(static_cast<std::size_t>(pass_count), Sync::kNone), seed);
  step.finish = true;
  return step;
}

struct WindowCase {
  MeshShape shape;
  Dtype dtype = Dtype::kF32;
  std::optional<Dtype> wire{};
};

void PrintTo(const WindowCase& row, std::ostream* out) {
  *out << to_string(row.shape) << " " << name(row.dtype) << " on "
       << (row.wire ? name(*row.wire) : "its own");
}

class WindowBits : public testing::TestWithParam<WindowCase> {};

TEST_P(WindowBits, AreThoseOfTheLocalSum) {
  const auto& [shape, dtype, wire] = GetParam();
  const std::vector<Delivery> deliveries{{}, {.order = Order::kRandom, .thread_count = 3}};
  for (const int pass_count : {1, 2, 4, 8}) {
    for (const AccumulateDtype sums : {AccumulateDtype::kF32, AccumulateDtype::kParam}) {
      const StepCase step =
          passes_of_one_window(odd_parameters(dtype), shape.size(), pass_count, 7);
      for (const bool is_declared : {false, true}) {
        for (const Delivery& delivery : deliveries) {
          const ReducerOptions options{
              .reduce_dtype = wire, .bucket_bytes = 512, .accumulate_dtype = sums};
          // Runs twice: nothing of the first window may be in the second.
          WindowOptions window{.accumulate_dtype = sums};
          if (is_declared) window.backwards = pass_count;
          SCOPED_TRACE(std::to_string(pass_count) + (is_declared ? " declared" : "") + " passes, " +
                       std::string(word_of(sums)));
          expect_result(shape, step, options, [&](Reducer& reducer, const Mesh& mesh) {
            for (int repeat = 0; repeat < 2; ++repeat) {
              run_window(reducer, step, {0, pass_count}, mesh.rank(), window, delivery);
              static_cast<void>(read_result(reducer, step));
            }
          });
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, WindowBits,
    testing::Values(WindowCase{{1, 1}}, WindowCase{{1, 2}}, WindowCase{{2, 1}}, WindowCase{{2, 2}},
                    WindowCase{{1, 3}, Dtype::kBf16}, WindowCase{{2, 1}, Dtype::kBf16},
                    WindowCase{{2, 2}, Dtype::kBf16}, WindowCase{{1, 2}, Dtype::kF16},
                    WindowCase{{2, 1}, Dtype::kF16}, WindowCase{{2, 2}, Dtype::kF16},
                    WindowCase{{2, 2}, Dtype::kF32, Dtype::kF16},
                    WindowCase{{2, 2}, Dtype::kF32, Dtype::kBf16}),
    [](const auto& row) {
      return to_string(row.param.shape) + "_" + std::string(name(row.param.dtype)) +
             (row.param.wire ? "_" + std::string(name(*row.param.wire)) : "");
    });

// A step's schedule, cut at random into windows and plain microbatches. The passes of a window
// count as `none` in the schedule, except the last one, which has the window's sync.
struct RandomWindows {
  StepCase step;
  std::vector<Passes> parts;  // of a single microbatch `is_window` says which it is
  std::vector<char> is_window;
  Sync partial = Sync::kShard;
};

RandomWindows random_windows(Random& random, const std::vector<ParameterSpec>& parameters,
                             int world_size) {
  RandomWindows result;
  result.partial = random.integer(0, 2) == 0 ? Sync::kNone : Sync::kShard;
  std::vector<Sync> schedule;
  const int part_count = random.integer(1, 5);
  for (int part = 0; part < part_count; ++part) {
    const bool is_window = random.integer(0, 2) != 0;
    const int pass_count = is_window ? random.integer(1, 4) : 1;
    const int first = static_cast<int>(schedule.size());
    schedule.insert(schedule.end(), static_cast<std::size_t>(pass_count), Sync::kNone);
    schedule.back() = part + 1 == part_count ? Sync::kAll : result.partial;
    result.parts.push_back({first, first + pass_count});
    result.is_window.push_back(is_window ? 1 : 0);
  }
  result.step = random_step(parameters, world_size, schedule, random.next());
  return result;
}

TEST(WindowsAndMicrobatches, AddUpInAnyOrder) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const std::vector<MeshShape> shapes{{1, 1}, {1, 2}, {2, 1}, {2, 2}, {3, 1}, {1, 3}};
    const MeshShape shape =
        shapes[static_cast<std::size_t>(random.integer(0, static_cast<int>(shapes.size()) - 1))];
    ReducerOptions options{.bucket_bytes = random.integer(0, 1) == 0 ? 256 : 1 << 20};
    if (random.integer(0, 1) == 0) options.reduce_dtype = kDtypes[random.next() % 3];
    if (random.integer(0, 1) == 0) options.replica_dtype = kDtypes[random.next() % 3];
    const std::vector<ParameterSpec> parameters = odd_parameters(kDtypes[random.next() % 3]);
    const RandomWindows what = random_windows(random, parameters, shape.size());
    Delivery delivery{.order = Order::kRandom, .seed = seed};
    delivery.thread_count = random.integer(1, 2);
    const bool declares = random.integer(0, 1) == 0;
    // A window adds its last pass too before it packs; in fp32 the result is the same.
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_result(shape, what.step, options, [&](Reducer& reducer, const Mesh& mesh) {
      reducer.set_partial_sync(what.partial);
      for (std::size_t part = 0; part < what.parts.size(); ++part) {
        const Passes passes = what.parts[part];
        const bool is_last = part + 1 == what.parts.size();
        if (what.is_window[part] == 0) {
          run_microbatch(reducer, what.step, passes.first, mesh.rank(), {.last = is_last},
                         delivery);
          continue;
        }
        WindowOptions window{.last = is_last};
        if (declares) window.backwards = passes.end - passes.first;
        run_window(reducer, what.step, passes, mesh.rank(), window, delivery);
      }
    });
  }
}

// The sums are exact, so they do not depend on which rank has how many gradients. On an f16 wire
// they would overflow without the exponents for the rank that counts most.
TEST(WindowCounts, DifferBetweenRanks) {
  constexpr float kValue = 4096;
  constexpr int kMost = 16;
  using Parts = std::vector<std::optional<bool>>;  // a window's `last`; none: a plain microbatch
  const std::vector<Parts> cases{
      {true}, {false, true}, {true, true}, {false, std::nullopt}, {false, false}};
  for (const Dtype wire : {Dtype::kF16, Dtype::kF32}) {
    for (const Sync partial : {Sync::kShard, Sync::kNone}) {
      for (const Accumulate accumulate : {Accumulate::kBuffer, Accumulate::kGrad}) {
        for (const Parts& parts : cases) {
          for (const MeshShape shape : {kSquare, MeshShape{2, 1}, MeshShape{1, 2}}) {
            SCOPED_TRACE(to_string(shape) + " " + std::string(name(wire)) + " parts " +
                         std::to_string(parts.size()));
            const int ranks = shape.size();
            run_mesh(shape, [&](const Mesh& mesh) {
              Reducer reducer(mesh, {.reduce_dtype = wire});
              reducer.register_parameter({.name = "w", .shape = {10}});
              reducer.register_parameter({.name = "once", .shape = {3}});
              reducer.set_partial_sync(partial);
              float expected = 0;
              float expected_once = 0;
              for (std::size_t part = 0; part < parts.size(); ++part) {
                const bool is_window = parts[part].has_value();
                const int most = is_window ? kMost : 1;
                const auto loud = static_cast<int>(part) % ranks;
                const int own = mesh.rank() == loud ? most : 1;
                expected +=
                    kValue * static_cast<float>(most + ranks - 1) / static_cast<float>(ranks);
                expected_once += kValue;
                const bool adds = accumulate == Accumulate::kBuffer;
                const float sum = adds ? kValue : kValue * static_cast<float>(own);
                const StoredGradient gradient(Values(10, sum), {10}, Dtype::kF32);
                const StoredGradient once(Values(3, kValue), {3}, Dtype::kF32);
                if (!is_window) {
                  Microbatch open(reducer, {.last = true});
                  reducer.gradient_ready("w", gradient.view());
                  reducer.gradient_ready("once", once.view());
                  open.end();
                  continue;
                }
                CoalescedWindow window({&reducer}, {.last = parts[part], .accumulate = accumulate});
                for (int k = 0; k < (adds ? own : 1); ++k) {
                  reducer.gradient_ready("w", gradient.view());
                }
                reducer.gradient_ready("once", once.view());
                window.end(adds ? 1 : own);
                if (*parts[part] && part + 1 < parts.size()) expected = expected_once = 0;
              }
              reducer.finish();
              EXPECT_FALSE(reducer.found_inf());
              EXPECT_THAT(values_of(reducer.shard("w")), testing::Each(expected));
              EXPECT_THAT(values_of(reducer.shard("once")), testing::Each(expected_once));
            });
          }
        }
      }
    }
  }
}

// The caller's fp32 sums, handed over once, have the same bits as the Reducer's.
TEST(WindowsThatAreHandedSums, HaveTheBitsOfTheLocalSum) {
  constexpr int kPasses = 4;
  const std::vector<ParameterSpec> parameters = odd_parameters(Dtype::kF32);
  for (const Dtype wire : kDtypes) {
    for (const MeshShape shape : {kSquare, MeshShape{2, 1}, MeshShape{1, 2}}) {
      const StepCase step = passes_of_one_window(parameters, shape.size(), kPasses, 11);
      const ReducerOptions options{.reduce_dtype = wire, .bucket_bytes = 512};
      SCOPED_TRACE("sums on " + std::string(name(wire)));
      expect_result(shape, step, options, [&](Reducer& reducer, const Mesh& mesh) {
        const auto rank = static_cast<std::size_t>(mesh.rank());
        CoalescedWindow window({&reducer}, {.accumulate = Accumulate::kGrad});
        std::vector<StoredGradient> stored;
        for (std::size_t p = 0; p < parameters.size(); ++p) {
          Values sum = *step.gradients[p][0][rank];
          for (std::size_t m = 1; m < kPasses; ++m) {
            const Values& next = *step.gradients[p][m][rank];
            for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += next[i];
          }
          stored.emplace_back(sum, parameters[p].shape, Dtype::kF32);
          reducer.gradient_ready(parameters[p].name, stored.back().view());
        }
        window.end(kPasses);
        for (StoredGradient& gradient : stored) gradient.poison();
        EXPECT_EQ(reducer.stats().accumulator_bytes, 0) << "no local sums";
        EXPECT_EQ(reducer.stats().retained_bytes, 0);
      });
    }
  }
}

// A declared parameter is reduced within the window, before its end; any other one at its end.
TEST(WindowOverlap, ReducesDeclaredPassesInsideOfTheWindow) {
  constexpr int kPasses = 3;
  for (const MeshShape shape : {MeshShape{1, 2}, MeshShape{2, 1}, kSquare}) {
    for (const Dtype wire : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const bool is_declared : {true, false}) {
        const StepCase step =
            passes_of_one_window(odd_parameters(Dtype::kF32), shape.size(), kPasses, 13);
        const ReducerOptions options{.reduce_dtype = wire, .bucket_bytes = 512};
        expect_result(shape, step, options, [&](Reducer& reducer, const Mesh& mesh) {
          WindowOptions declared;
          if (is_declared) declared.backwards = kPasses;
          CoalescedWindow window({&reducer}, declared);
          for (int m = 0; m < kPasses; ++m) {
            static_cast<void>(deliver(reducer, step, m, mesh.rank()));
          }
          const auto reduced = [&] {
            const ReducerStats stats = reducer.stats();
            return shape.replicate > 1 ? stats.all_reduce_count : stats.reduce_scatter_count;
          };
          if (is_declared && wire != Dtype::kF16) {
            const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
            while (reduced() < reducer.stats().bucket_count &&
                   std::chrono::steady_clock::now() < limit) {
              std::this_thread::yield();
            }
            EXPECT_EQ(reduced(), reducer.stats().bucket_count);
          } else {  // an f16 wire needs the counts of all ranks
            EXPECT_EQ(reduced(), 0);
          }
          static_cast<void>(mesh.world().exchange("", "looked"));
          window.end();
        });
      }
    }
  }
}

// A parameter that got fewer gradients than declared is sent at the end.
TEST(WindowOverlap, TakesFewerPassesThanDeclared) {
  run_mesh(kSquare, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 32});
    reducer.register_parameter({.name = "every", .shape = {10}});
    reducer.register_parameter({.name = "once", .shape = {10}});
    const StoredGradient gradient(Values(10, 1.0F), {10}, Dtype::kF32);
    CoalescedWindow window({&reducer}, {.backwards = 3});
    for (int k = 0; k < 3; ++k) reducer.gradient_ready("every", gradient.view());
    reducer.gradient_ready("once", gradient.view());
    window.end();
    EXPECT_EQ(values_of(reducer.shard("every"))[0], 3.0F);
    EXPECT_EQ(values_of(reducer.shard("once"))[0], 1.0F);
  });
}

// With missing = zero a parameter without any gradient counts as zeros. Each rank may lack other
// ones.
TEST(WindowHoles, AreZeros) {
  for (const Dtype wire : {Dtype::kF32, Dtype::kF16}) {
    run_mesh(kSquare, [&](const Mesh& mesh) {
      Reducer reducer(mesh, {.reduce_dtype = wire, .missing = Missing::kZero});
      for (int p = 0; p < 5; ++p) {
        reducer.register_parameter({.name = std::to_string(p), .shape = {10}});
      }
      const StoredGradient gradient(Values(10, 1.0F), {10}, Dtype::kF32);
      CoalescedWindow window({&reducer}, {});
      for (int p = 0; p < 4; ++p) {
        if (p == mesh.rank()) continue;
        for (int k = 0; k <= mesh.rank(); ++k) {
          reducer.gradient_ready(std::to_string(p), gradient.view());
        }
      }
      window.end();
      for (int p = 0; p < 4; ++p) {
        const float expected = static_cast<float>(10 - (p + 1)) / 4;
        EXPECT_THAT(values_of(reducer.shard(std::to_string(p))), testing::Each(expected));
      }
      EXPECT_THAT(values_of(reducer.shard("4")), testing::Each(0.0F));
    });
  }
}

}  // namespace
}  // namespace hsdp
