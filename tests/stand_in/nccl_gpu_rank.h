// One rank of a step on the NCCL engine.
#pragma once

#include <cstdint>
#include <vector>

#include "hsdp/device/copy.h"
#include "nccl_ranks.h"
#include "tests/support/reducer_step.h"

namespace hsdp::test {

// Hands a step's gradients over on a GPU and reads its result.
class GpuRank {
 public:
  GpuRank(Reducer& reducer, const StepCase& step, const Mesh& mesh)
      : reducer_(reducer),
        step_(step),
        rank_(static_cast<std::size_t>(mesh.rank())),
        device_(mesh.device()),
        stream_(Stream::create(device_, "caller")) {
    register_all(reducer_, step_);
    reducer_.set_stream(stream_);
  }
  ~GpuRank() { reducer_.packed().wait(); }  // before the gradients go
  GpuRank(const GpuRank&) = delete;
  GpuRank& operator=(const GpuRank&) = delete;

  void begin(std::size_t m) { reducer_.begin_microbatch({.sync = step_.schedule[m]}); }
  void hand_over(std::size_t p, std::size_t m) {
    const ParameterSpec& spec = step_.parameters[p];
    stored_.emplace_back(*step_.gradients[p][m][rank_], spec.shape, spec.dtype);
    StridedView view = stored_.back().view();
    view.device = device_;
    reducer_.gradient_ready(spec.name, view, {}, Event());
  }
  void run_microbatch(std::size_t m) {
    begin(m);
    for (std::size_t p = 0; p < step_.parameters.size(); ++p) hand_over(p, m);
    reducer_.end_microbatch();
  }
  RankResult run_step() {
    for (std::size_t m = 0; m < step_.schedule.size(); ++m) run_microbatch(m);
    if (step_.finish) reducer_.finish();
    return read();
  }
  RankResult read() {
    RankResult result;
    for (const ParameterSpec& spec : step_.parameters) {
      const TensorView shard = reducer_.shard(spec.name);
      result.slices.push_back(reducer_.slice(spec.name));
      result.shards.emplace_back(static_cast<std::size_t>(shard.count));
      copy_bytes(result.shards.back().data(), shard.data, shard.size_in_bytes(), stream_);
    }
    stream_.synchronize();
    return result;
  }

 private:
  Reducer& reducer_;
  const StepCase& step_;
  std::size_t rank_;
  Device device_;
  Stream stream_;
  std::vector<StoredGradient> stored_;
};

inline std::vector<ParameterSpec> parameters(Dtype dtype) {
  return {{.name = "matrix", .shape = {37, 29}, .dtype = dtype},
          {.name = "odd", .shape = {7}, .dtype = dtype},
          {.name = "large", .shape = {5003}, .dtype = dtype},
          {.name = "empty", .shape = {0}, .dtype = dtype},
          {.name = "scalar", .shape = {}, .dtype = dtype}};
}

constexpr std::int64_t kSmallBuckets = 4096;

}  // namespace hsdp::test
