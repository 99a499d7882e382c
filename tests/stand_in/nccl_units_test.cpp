// Gathers of units on the NCCL engine: beside microbatches, on streams that work late, and on ranks
// that ask for other units than their peers.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cuda_stand_in.h"
#include "gpu_rank.h"
#include "nccl_ranks.h"
#include "zero/unit_gather.h"

namespace hsdp::test {
namespace {

using zero::ParameterUnit;
using zero::UnitGather;

constexpr int kUnits = 3;

class NcclUnits : public ::testing::TestWithParam<MeshShape> {
 protected:
  void TearDown() override { stand_in::delay_work({}); }
};

// A unit of every parameter of the step, as fp32 slices on the GPU, which are rounded to bf16.
class GpuUnits {
 public:
  GpuUnits(Reducer& reducer, const StepCase& step, const Mesh& mesh, Stream& stream)
      : reducer_(reducer), step_(step), stream_(stream) {
    for (int u = 0; u < kUnits; ++u) {
      for (const ParameterSpec& spec : step.parameters) {
        const std::int64_t count = element_count(spec.shape);
        wholes_.emplace_back(static_cast<std::size_t>(count) * size_bytes(Dtype::kBf16));
        views_.push_back({wholes_.back().data(), count, Dtype::kBf16, mesh.device()});
        stored_.emplace_back(static_cast<std::size_t>(reducer.slice(spec.name).count));
        updated_.emplace_back(stored_.back().size());
      }
    }
  }

  [[nodiscard]] std::vector<ParameterUnit> units() {
    std::vector<ParameterUnit> all;
    for (int u = 0; u < kUnits; ++u) {
      ParameterUnit& unit = all.emplace_back(ParameterUnit{"unit " + std::to_string(u), {}});
      for (std::size_t p = 0; p < step_.parameters.size(); ++p) {
        const std::size_t k = place(u, p);
        unit.parameters.push_back(
            {step_.parameters[p].name,
             Dtype::kBf16,
             views_[k].count,
             {stored_[k].data(), std::ssize(stored_[k]), Dtype::kF32, views_[k].device}});
      }
    }
    return all;
  }
  // On the stream, in its order.
  void update(int number) {
    stream_.synchronize();  // what it copies from is free
    for (int u = 0; u < kUnits; ++u) {
      for (std::size_t p = 0; p < step_.parameters.size(); ++p) {
        const std::size_t k = place(u, p);
        const Values whole = values(number, k);
        const Slice own = reducer_.slice(step_.parameters[p].name);
        std::copy_n(whole.begin() + own.offset, own.count, updated_[k].begin());
        copy_bytes(stored_[k].data(), updated_[k].data(), updated_[k].size() * sizeof(float),
                   stream_);
      }
    }
  }
  [[nodiscard]] std::vector<TensorView> arrays(int u) const {
    const auto first = views_.begin() + static_cast<std::ptrdiff_t>(place(u, 0));
    return {first, first + std::ssize(step_.parameters)};
  }
  void expect(int number, int u, const std::string& label) {
    for (std::size_t p = 0; p < step_.parameters.size(); ++p) {
      const std::size_t k = place(u, p);
      std::vector<std::byte> got(views_[k].size_in_bytes());
      copy_bytes(got.data(), views_[k].data, got.size(), stream_);
      stream_.synchronize();
      Values want = values(number, k);
      for (float& value : want) value = round_to(Dtype::kBf16, value);
      expect_same_bits(decoded(got, Dtype::kBf16), want, label);
    }
  }

 private:
  [[nodiscard]] std::size_t place(int u, std::size_t p) const {
    return (static_cast<std::size_t>(u) * step_.parameters.size()) + p;
  }
  [[nodiscard]] Values values(int number, std::size_t k) const {
    return random_values(views_[k].count, Dtype::kF32,
                         (100 * static_cast<std::uint64_t>(number)) + k, {-4, 4});
  }

  Reducer& reducer_;
  const StepCase& step_;
  Stream& stream_;
  std::vector<std::vector<std::byte>> wholes_;
  std::vector<TensorView> views_;
  std::vector<Values> stored_;
  std::vector<Values> updated_;
};

TEST_P(NcclUnits, AreGatheredBesideMicrobatches) {
  const MeshShape shape = GetParam();
  for (const std::uint64_t seed : {0U, 1U, 2U}) {
    const StepCase step =
        random_step(odd_parameters(Dtype::kBf16), shape.size(), {Sync::kShard, Sync::kAll}, seed);
    const ReducerOptions options{.bucket_bytes = 4096};
    if (seed > 0) stand_in::delay_work(seed);
    const auto results = nccl_results(shape, [&](const Mesh& mesh) {
      Reducer reducer(mesh, options);
      GpuRank rank(reducer, step, mesh);
      reducer.prepare();
      GpuUnits units(reducer, step, mesh, rank.stream());
      UnitGather gather(reducer, units.units());
      RankResult result;
      std::mt19937 random(static_cast<unsigned>(seed) + static_cast<unsigned>(mesh.rank()));
      for (int number = 0; number < 3; ++number) {
        units.update(number);
        for (std::size_t m = 0; m < step.schedule.size(); ++m) {
          for (int i = 0; i < 4; ++i) {
            const int u = seed == 2 ? static_cast<int>(random() % kUnits) : i % kUnits;
            gather.gather(u, units.arrays(u), rank.stream().record());
            if (i == 1) rank.run_microbatch(m);
            gather.wait(u, rank.stream());
            units.expect(number, u, "seed " + std::to_string(seed));
          }
          gather.end();
        }
        result = rank.read();
        rank.stream().wait(gather.begin_update());
      }
      rank.stream().synchronize();
      return result;
    });
    expect_reference(results, step, options, shape, "beside gathers");
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, NcclUnits,
                         ::testing::Values(MeshShape{1, 2}, MeshShape{2, 2}, MeshShape{1, 3}),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace hsdp::test
