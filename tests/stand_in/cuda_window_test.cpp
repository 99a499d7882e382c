// Windows on the memory and the streams of a GPU, on the stand-in for the CUDA runtime: their bits,
// wherever local sums lie, and that the host does not wait.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda_stand_in.h"
#include "device_rank.h"
#include "tests/support/reducer_step.h"
#include "zero/coalesced_window.h"

namespace hsdp {
namespace {

using stand_in::Rank;
using stand_in::run_gpu_mesh;
using zero::CoalescedWindow;

constexpr std::size_t kPasses = 3;

// Each pass adds; what the window sends is what finish() would.
test::StepCase passes(Dtype dtype, int world_size, std::uint64_t seed) {
  test::StepCase step = test::random_step(stand_in::parameters(dtype), world_size,
                                          std::vector<Sync>(kPasses, Sync::kNone), seed);
  step.finish = true;
  return step;
}

void run_window(Reducer& reducer, const test::StepCase& step, Rank& rank,
                const WindowOptions& options) {
  CoalescedWindow window({&reducer}, options);
  for (std::size_t m = 0; m < kPasses; ++m) {
    for (std::size_t p = 0; p < step.parameters.size(); ++p) rank.hand_over(p, m);
  }
  window.end();
}

class WindowOnGpu : public ::testing::TestWithParam<test::MeshShape> {};

TEST_P(WindowOnGpu, HasTheBitsOfTheLocalSum) {
  const test::MeshShape shape = GetParam();
  std::uint64_t seed = 30;
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const AccumulateOn place : {AccumulateOn::kDevice, AccumulateOn::kHost}) {
      for (const AccumulateDtype sums : {AccumulateDtype::kF32, AccumulateDtype::kParam}) {
        for (const bool is_declared : {false, true}) {
          const test::StepCase step = passes(dtype, shape.size(), ++seed);
          const ReducerOptions options{
              .bucket_bytes = 4096, .accumulate_dtype = sums, .accumulate_on = place};
          std::vector<test::RankResult> results(static_cast<std::size_t>(shape.size()));
          run_gpu_mesh(shape, [&](const Mesh& mesh) {
            Reducer reducer(mesh, options);
            test::register_all(reducer, step);
            Rank rank(reducer, step, mesh.rank());
            WindowOptions window{.accumulate_dtype = sums};
            if (is_declared) window.backwards = std::int64_t{kPasses};
            auto& result = results[static_cast<std::size_t>(mesh.rank())];
            for (int repeat = 0; repeat < 2; ++repeat) {
              result = {};
              run_window(reducer, step, rank, window);
              rank.read(result);
              rank.stream().synchronize();
            }
            reducer.release_memory();
            EXPECT_EQ(reducer.stats().accumulator_bytes, 0);
          });
          test::expect_reference(results, step, options, shape,
                                 std::string(name(dtype)) + " " + std::string(word_of(sums)) +
                                     " on " + std::string(word_of(place)));
        }
      }
    }
  }
}

TEST_P(WindowOnGpu, ReadsLocalSumsAfterWhatIsAdded) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step = passes(Dtype::kBf16, shape.size(), 50);
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    CoalescedWindow window({&reducer}, {.backwards = std::int64_t{kPasses}});
    test::Values sum(7, 0.0F);
    for (std::size_t m = 0; m < kPasses; ++m) {
      for (std::size_t p = 0; p < step.parameters.size(); ++p) rank.hand_over(p, m);
      const test::Values& fresh = *step.gradients[1][m][static_cast<std::size_t>(mesh.rank())];
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = m == 0 ? fresh[i] : sum[i] + fresh[i];
      test::expect_same_bits(reducer.local_sum("odd"), sum, "pass " + std::to_string(m));
    }
    window.end();
    static_cast<void>(reducer.found_inf());
  });
}

TEST_P(WindowOnGpu, TheHostDoesNotWaitForTheGpu) {
  const test::MeshShape shape = GetParam();
  const test::StepCase step = passes(Dtype::kF16, shape.size(), 60);
  const ReducerOptions options{.bucket_bytes = 4096};
  std::vector<test::RankResult> results(static_cast<std::size_t>(shape.size()));
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    test::register_all(reducer, step);
    Rank rank(reducer, step, mesh.rank());
    run_window(reducer, step, rank, {});  // takes the memory that windows need
    static_cast<void>(reducer.found_inf());
    static_cast<void>(mesh.world().exchange("", "ready"));
    {
      const stand_in::Standstill nothing_moves;
      run_window(reducer, step, rank, {.last = true});
      run_window(reducer, step, rank, {.last = true, .backwards = std::int64_t{kPasses}});
      rank.read(results[static_cast<std::size_t>(mesh.rank())]);
      EXPECT_FALSE(rank.stream().record().complete());
    }
    rank.stream().synchronize();
  });
  test::expect_reference(results, step, options, shape, "standing still");
}

INSTANTIATE_TEST_SUITE_P(Meshes, WindowOnGpu,
                         ::testing::Values(test::MeshShape{1, 1}, test::MeshShape{1, 2},
                                           test::MeshShape{2, 1}, test::kSquare),
                         [](const auto& row) { return to_string(row.param); });

}  // namespace
}  // namespace hsdp
