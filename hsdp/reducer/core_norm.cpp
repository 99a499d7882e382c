// The norm of a result, and clipping by it.
#include <cmath>
#include <numeric>
#include <vector>

#include "hsdp/device/copy.h"
#include "hsdp/device/scratch.h"
#include "hsdp/kernels/clip.h"
#include "hsdp/kernels/norm.h"
#include "hsdp/kernels/scale_and_cast.h"
#include "hsdp/reducer/core.h"

namespace hsdp {

double Reducer::Core::squared_norm() {
  require_result("grad_norm");
  check_usable("grad_norm");
  // On the host in the end, in the order of the parameters.
  std::vector<double> sums(static_cast<std::size_t>(parameters_.size()));
  run_on_device([&](Stream& stream) {
    const Scratch of_slices(sums.size() * sizeof(double), stream);
    auto* const slots = reinterpret_cast<double*>(of_slices.data());
    for (int p = 0; p < parameters_.size(); ++p) {
      kernels::squared_norm(frozen_->memory().carry(frozen_->layout().slice(p, mesh_.shard_rank())),
                            slots + p, stream);
    }
    copy_bytes(sums.data(), slots, sums.size() * sizeof(double), stream);
  });
  frozen_->pipeline().wait_done();
  double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
  if (shard_group_.size() == 1) return sum;
  run_on_device(
      [&](Stream& stream) {
        const Scratch shared(sizeof(double), stream);
        copy_bytes(shared.data(), &sum, sizeof(sum), stream);
        shard_group_.all_reduce(TensorView{shared.data(), 1, Dtype::kF64, stream.device()}, stream);
        copy_bytes(&sum, shared.data(), sizeof(sum), stream);
      },
      Scope::kAllRanks);
  frozen_->pipeline().wait_done();
  return sum;
}

// Of this rank's slices at first, each parameter's in a word of its own, summed in their order.
void Reducer::Core::sum_squares(double* sum, Stream& stream) {
  const Scratch of_slices(static_cast<std::size_t>(parameters_.size()) * sizeof(double), stream);
  auto* const slots = reinterpret_cast<double*>(of_slices.data());
  for (int p = 0; p < parameters_.size(); ++p) {
    kernels::squared_norm(frozen_->memory().carry(frozen_->layout().slice(p, mesh_.shard_rank())),
                          slots + p, stream);
  }
  kernels::sum_in_order(slots, parameters_.size(), sum, stream);
  if (shard_group_.size() == 1) return;
  shard_group_.all_reduce(TensorView{sum, 1, Dtype::kF64, stream.device()}, stream);
}

void Reducer::Core::squared_norm(double* sum) {
  require_result("grad_norm");
  check_usable("grad_norm");
  run_on_device([&](Stream& stream) { sum_squares(sum, stream); }, Scope::kAllRanks);
}

void Reducer::Core::grad_norm(TensorView out) {
  require_output(out, Dtype::kF64, 1, "grad_norm");
  auto* const norm = static_cast<double*>(out.data);
  if (out.device.type == DeviceType::kHost) {
    *norm = std::sqrt(squared_norm());
    return;
  }
  squared_norm(norm);
  kernels::clip_factor({.squares = norm, .count = 1, .norm = norm}, caller_);
}

void Reducer::Core::scale_shards(const float* factor) {
  run_on_device([&](Stream& stream) {
    for (const Bucket& bucket : frozen_->layout().buckets()) {
      kernels::scale_by(frozen_->memory().carry(bucket), factor, stream);
    }
  });
}

void Reducer::Core::scale_shards(double multiplier) {
  run_on_device([&](Stream& stream) {
    for (const Bucket& bucket : frozen_->layout().buckets()) {
      const TensorView carry = frozen_->memory().carry(bucket);
      kernels::ScaleAndCast args;
      args.in = args.out = carry.data;
      args.count = carry.count;
      args.multiplier = static_cast<float>(multiplier);
      kernels::scale_and_cast(args, stream);
    }
  });
}

}  // namespace hsdp
