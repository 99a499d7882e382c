// Windows on the memory and the streams of a GPU, on the stand-in for the CUDA runtime: their bits,
// wherever local sums lie, and that the host does not wait.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda_stand_in.h"
#include "gpu_rank.h"
#include "zero/coalesced_window.h"

namespace hsdp::test {
namespace {

using zero::CoalescedWindow;

constexpr std::size_t kPasses = 3;

// Each pass adds; what the window sends is what finish() would.
StepCase passes(Dtype dtype, int world_size, std::uint64_t seed) {
  StepCase step =
      random_step(parameters(dtype), world_size, std::vector<Sync>(kPasses, Sync::kNone), seed);
  step.finish = true;
  return step;
}

void run_window(Reducer& reducer, GpuRank& rank, const WindowOptions& options) {
  CoalescedWindow window({&reducer}, options);
  for (std::size_t m = 0; m < kPasses; ++m) rank.hand_over_all(m);
  window.end();
}

class WindowOnGpu : public ::testing::TestWithParam<MeshShape> {};

TEST_P(WindowOnGpu, HasTheBitsOfTheLocalSum) {
  const MeshShape shape = GetParam();
  std::uint64_t seed = 30;
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const AccumulateOn place : {AccumulateOn::kDevice, AccumulateOn::kHost}) {
      for (const AccumulateDtype sums : {AccumulateDtype::kF32, AccumulateDtype::kParam}) {
        for (const bool is_declared : {false, true}) {
          const StepCase step = passes(dtype, shape.size(), ++seed);
          const ReducerOptions options{
              .bucket_bytes = 4096, .accumulate_dtype = sums, .accumulate_on = place};
          const auto results = gpu_results(shape, [&](const Mesh& mesh) {
            Reducer reducer(mesh, options);
            GpuRank rank(reducer, step, mesh);
            WindowOptions window{.accumulate_dtype = sums};
            if (is_declared) window.backwards = std::int64_t{kPasses};
            RankResult result;
            for (int repeat = 0; repeat < 2; ++repeat) {
              run_window(reducer, rank, window);
              result = rank.read();
            }
            reducer.release_memory();
            EXPECT_EQ(reducer.stats().accumulator_bytes, 0);
            return result;
          });
          expect_reference(results, step, options, shape,
                           std::string(name(dtype)) + " " + std::string(word_of(sums)) + " on " +
                               std::string(word_of(place)));
        }
      }
    }
  }
}

TEST_P(WindowOnGpu, ReadsLocalSumsAfterWhatIsAdded) {
  const MeshShape shape = GetParam();
  const StepCase step = passes(Dtype::kBf16, shape.size(), 50);
  run_gpu_mesh(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, {.bucket_bytes = 4096});
    GpuRank rank(reducer, step, mesh);
    CoalescedWindow window({&reducer}, {.backwards = std::int64_t{kPasses}});
    Values sum(7, 0.0F);
    for (std::size_t m = 0; m < kPasses; ++m) {
      rank.hand_over_all(m);
      const Values& fresh = *step.gradients[1][m][static_cast<std::size_t>(mesh.rank())];
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = m == 0 ? fresh[i] : sum[i] + fresh[i];
      expect_same_bits(reducer.local_sum("odd"), sum, "pass " + std::to_string(m));
    }
    window.end();
    static_cast<void>(reducer.found_inf());
  });
}

TEST_P(WindowOnGpu, TheHostDoesNotWaitForTheGpu) {
  const MeshShape shape = GetParam();
  const StepCase step = passes(Dtype::kF16, shape.size(), 60);
  const ReducerOptions options{.bucket_bytes = 4096};
  const auto results = gpu_results(shape, [&](const Mesh& mesh) {
    Reducer reducer(mesh, options);
    GpuRank rank(reducer, step, mesh);
    run_window(reducer, rank, {});  // takes the memory that windows need
    static_cast<void>(reducer.found_inf());
    static_cast<void>(mesh.world().exchange("", "ready"));
    RankResult result;
    {
      const stand_in::Standstill nothing_moves;
      run_window(reducer, rank, {.last = true});
      run_window(reducer, rank, {.last = true, .backwards = std::int64_t{kPasses}});
      rank.enqueue_read(result);
      EXPECT_FALSE(rank.stream().record().complete());
    }
    rank.stream().synchronize();
    return result;
  });
  expect_reference(results, step, options, shape, "standing still");
}

INSTANTIATE_TEST_SUITE_P(Meshes, WindowOnGpu,
                         ::testing::Values(MeshShape{1, 1}, MeshShape{1, 2}, MeshShape{2, 1},
                                           kSquare),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace hsdp::test
