#include "hsdp/reducer/gradient_norm.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "hsdp/device/scratch.h"
#include "hsdp/kernels/clip.h"
#include "hsdp/kernels/norm.h"

namespace hsdp::reducer {
namespace {

using Scope = Lane::Scope;

// As in torch's clip_grad_norm_; a norm of exactly max_norm is scaled very slightly.
constexpr double kClipEpsilon = 1e-6;

// Sums the squares of the whole mean gradient: of each parameter's slice, then over the parameters
// in their order, then over the ranks. Takes no Results, which its task may outlive.
void sum_squares(Frozen& frozen, Groups& groups, const OperationPlace& place, double* sum,
                 Stream& stream) {
  Operation operation(groups.operations, place);
  const int count = frozen.layout().parameter_count();
  const Scratch of_slices(static_cast<std::size_t>(count) * sizeof(double), stream);
  auto* const slots = reinterpret_cast<double*>(of_slices.data());
  std::vector<kernels::SquaredNorm> norms(static_cast<std::size_t>(count));
  for (int p = 0; p < count; ++p) {
    norms[static_cast<std::size_t>(p)] = {frozen.memory().slice_result(p), slots + p};
  }
  // A call takes values of one dtype.
  const auto wide = std::stable_partition(norms.begin(), norms.end(), [](const auto& norm) {
    return norm.values.dtype != Dtype::kF64;
  });
  kernels::squared_norms({norms.begin(), wide}, stream);
  kernels::squared_norms({wide, norms.end()}, stream);
  kernels::sum_in_order(slots, count, sum, stream);
  const TensorView of_rank{sum, 1, Dtype::kF64, stream.device()};
  if (groups.shard.size() > 1) groups.shard.all_reduce(of_rank, stream);
  if (groups.parts > 1) groups.replicate.all_reduce(of_rank, stream);
  if (!groups.on_host()) operation.end(OperationState::kIssued);
}

void scale_result(Frozen& frozen, const double* factor, Stream& stream) {
  for (int b = 0; b < std::ssize(frozen.layout().buckets()); ++b) {
    kernels::scale_by(frozen.memory().bucket_result(b), factor, stream);
  }
}

// Sums one Reducer's squares after those events.
Event add_squares(Results& results, std::shared_ptr<double> sum, std::vector<Event> after) {
  return results.run(Scope::kAllRanks, results.last_step(),
                     [frozen = results.steps().frozen(), &groups = results.groups(),
                      place = results.next_place(OperationKind::kNorm), sum = std::move(sum),
                      after = std::move(after)](Stream& stream) {
                       stream.wait_in_task(after);
                       sum_squares(*frozen, groups, place, sum.get(), stream);
                     });
}

// Returns what `compute` writes to an f64 of the device.
double read_norm(Results& results, const std::function<Event(const TensorView&)>& compute) {
  double norm = 0.0;
  results.read({&norm, 1, Dtype::kF64, {}}, [&](const TensorView& out) {
    const Event done = compute(out);
    if (results.groups().on_host()) results.await(done);
  });
  return norm;
}

}  // namespace

Event grad_norm(Results& results, TensorView out) {
  results.require_output(out, Dtype::kF64, 1, "grad_norm");
  results.expect_result("grad_norm");
  auto* const norm = static_cast<double*>(out.data);
  return results.run(Scope::kAllRanks, results.last_step(),
                     [frozen = results.steps().frozen(), &groups = results.groups(),
                      place = results.next_place(OperationKind::kNorm), norm](Stream& stream) {
                       sum_squares(*frozen, groups, place, norm, stream);
                       kernels::clip_factor({.squares = norm, .count = 1, .norm = norm}, stream);
                     });
}

double grad_norm(Results& results) {
  results.require_result("grad_norm");
  return read_norm(results, [&](const TensorView& out) { return grad_norm(results, out); });
}

Event clip_factor(std::span<Results* const> all, double max_norm, TensorView norm,
                  TensorView factor, std::string_view call) {
  Results& first = *all.front();
  first.require_output(norm, Dtype::kF64, 1, call);
  const bool narrow = factor.dtype == Dtype::kF32;
  first.require_output(factor, narrow ? Dtype::kF32 : Dtype::kF64, 1, call);
  const Stream& caller = first.steps().caller();
  for (Results* results : all) {
    results->steps().set_caller(caller);
    results->expect_result(call);
  }
  const auto words = std::make_shared<const Scratch>(all.size() * sizeof(double), caller);
  auto* const squares = reinterpret_cast<double*>(words->data());
  // If the step of one is dropped, no rank begins a collective of another: the rank that dropped it
  // may never call this clip.
  std::vector<Event> standing;
  for (Results* results : all) {
    standing.push_back(results->run(Scope::kThisRank, results->last_step(), [](Stream&) {}));
  }
  std::vector<Event> summed;
  for (std::size_t i = 0; i < all.size(); ++i) {
    // Each keeps the memory: if one fails, the last task does not wait for the others.
    summed.push_back(add_squares(*all[i], {words, squares + i}, standing));
  }
  const kernels::ClipFactor clip{
      .squares = squares,
      .count = std::ssize(all),
      .max_norm = max_norm,
      .epsilon = kClipEpsilon,
      .norm = static_cast<double*>(norm.data),
      .factor = narrow ? nullptr : static_cast<double*>(factor.data),
      .narrow_factor = narrow ? static_cast<float*>(factor.data) : nullptr};
  return first.run(Scope::kThisRank, kNoStep, [summed, clip, words](Stream& stream) {
    stream.wait_in_task(summed);
    kernels::clip_factor(clip, stream);
  });
}

Event clip_grad_norm(std::span<Results* const> all, double max_norm, TensorView norm) {
  Results& first = *all.front();
  const auto word = std::make_shared<const Scratch>(sizeof(double), first.steps().caller());
  const TensorView factor{word->data(), 1, Dtype::kF64, first.groups().device};
  const Event known = clip_factor(all, max_norm, norm, factor, "clip_grad_norm");
  std::vector<Event> scaled;
  for (Results* results : all) {
    const auto scale = [frozen = results->steps().frozen(), known, word](Stream& stream) {
      stream.wait_in_task({&known, 1});
      scale_result(*frozen, reinterpret_cast<const double*>(word->data()), stream);
    };
    scaled.push_back(results->run(Scope::kThisRank, results->last_step(), scale));
  }
  if (scaled.size() == 1) return scaled.front();
  return first.run(Scope::kThisRank, kNoStep,
                   [scaled](Stream& stream) { stream.wait_in_task(scaled); });
}

double clip_grad_norm(std::span<Results* const> all, double max_norm) {
  for (Results* results : all) results->require_result("clip_grad_norm");
  return read_norm(*all.front(),
                   [&](const TensorView& out) { return clip_grad_norm(all, max_norm, out); });
}

}  // namespace hsdp::reducer
