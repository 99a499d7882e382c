#include "hsdp/reducer.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <string>
#include <utility>

#include "hsdp/device/scratch.h"
#include "hsdp/error.h"
#include "hsdp/kernels/clip.h"
#include "hsdp/reducer/core.h"

namespace hsdp {
namespace {

// torch's clip_grad_norm_ adds the same: a norm of exactly max_norm is scaled by a hair.
constexpr double kClipEpsilon = 1e-6;

void check_clip(std::span<Reducer* const> reducers, double max_norm) {
  if (!(max_norm >= 0)) {
    throw UsageError("reducer: clip_grad_norm: expected a max_norm of at least 0, got " +
                     std::to_string(max_norm));
  }
  for (std::size_t i = 0; i < reducers.size(); ++i) {
    if (reducers[i] != nullptr && std::ranges::count(reducers, reducers[i]) == 1) continue;
    throw UsageError("reducer: clip_grad_norm: expected every Reducer once, got " +
                     std::string(reducers[i] == nullptr ? "none" : "one again") + " as number " +
                     std::to_string(i));
  }
}

}  // namespace

Reducer::Reducer(const Mesh& mesh, ReducerOptions options)
    : core_(std::make_unique<Core>(mesh, std::move(options))) {}
Reducer::~Reducer() = default;
Reducer::Reducer(Reducer&&) noexcept = default;
Reducer& Reducer::operator=(Reducer&&) noexcept = default;

int Reducer::register_parameter(const ParameterSpec& spec) {
  return core_->register_parameter(spec);
}
void Reducer::set_requires_gradient_sync(bool flag, const std::optional<std::string>& group) {
  core_->set_requires_gradient_sync(flag, group);
}
void Reducer::set_requires_all_reduce(bool flag, const std::optional<std::string>& group) {
  core_->set_requires_all_reduce(flag, group);
}
void Reducer::set_gradient_divide_factor(std::optional<double> factor) {
  core_->set_gradient_divide_factor(factor);
}
void Reducer::set_loss_scale(double scale) { core_->set_loss_scale(scale); }

void Reducer::set_stream(const Stream& stream) { core_->set_stream(stream); }
void Reducer::begin_step() { core_->begin_step(); }
void Reducer::begin_microbatch(const MicrobatchOptions& options) {
  core_->begin_microbatch(options);
}
void Reducer::gradient_ready(std::string_view name, const StridedView& gradient,
                             std::shared_ptr<const void> keep_alive,
                             const std::optional<Event>& produced) {
  gradient_ready(core_->find_in_microbatch(name), gradient, std::move(keep_alive), produced);
}
void Reducer::gradient_ready(int parameter, const StridedView& gradient,
                             std::shared_ptr<const void> keep_alive,
                             const std::optional<Event>& produced, KeptUntil kept_until) {
  core_->gradient_ready(parameter, gradient, {std::move(keep_alive), kept_until}, produced);
}
std::vector<Stream> Reducer::pack_streams() const { return core_->pack_streams(); }
Event Reducer::packed() { return core_->packed(); }
void Reducer::reject_gradient(std::string_view message) { core_->reject_gradient(message); }
void Reducer::end_microbatch() { core_->end_microbatch(); }
void Reducer::abandon_step(std::string_view reason) noexcept { core_->abandon_step(reason); }
void Reducer::finish() { core_->finish(); }
void Reducer::discard() { core_->discard(); }
void Reducer::close() { core_->close(); }

TensorView Reducer::shard(std::string_view name) { return core_->shard(core_->find(name)); }
std::vector<float> Reducer::partial_shard(std::string_view name) {
  return core_->partial_shard(core_->find(name));
}
void Reducer::partial_shard(std::string_view name, TensorView out) {
  core_->partial_shard(core_->find(name), out);
}
Slice Reducer::slice(std::string_view name) { return core_->slice(core_->find(name)); }
const std::vector<ParameterSpec>& Reducer::parameters() const { return core_->parameters(); }

void Reducer::gather_gradients(std::span<const NamedArray> arrays) {
  core_->gather_gradients(arrays);
}
void Reducer::gather_parameters(std::span<const NamedArray> arrays) {
  core_->gather_parameters(arrays);
}

double Reducer::grad_norm() { return std::sqrt(core_->squared_norm()); }
void Reducer::grad_norm(TensorView out) { core_->grad_norm(out); }
double Reducer::clip_grad_norm(double max_norm) {
  Reducer* const self = this;
  return hsdp::clip_grad_norm(std::span<Reducer* const>(&self, 1), max_norm);
}
bool Reducer::found_inf() { return core_->found_inf(); }
void Reducer::found_inf(TensorView out) { core_->found_inf(out); }

void Reducer::save_snapshot(const std::filesystem::path& path, std::int64_t step) {
  core_->save_snapshot(path, step);
}
void Reducer::flush_snapshots() { core_->flush_snapshots(); }
ReducerStats Reducer::stats() const { return core_->stats(); }
ReducerState Reducer::state() const { return core_->state(); }

double clip_grad_norm(std::span<Reducer* const> reducers, double max_norm) {
  check_clip(reducers, max_norm);
  double squared = 0;
  for (Reducer* reducer : reducers) squared += reducer->core_->squared_norm();
  const double norm = std::sqrt(squared);
  const double scale = max_norm / (norm + kClipEpsilon);
  if (scale < 1.0) {
    for (Reducer* reducer : reducers) reducer->core_->scale_shards(scale);
  }
  return norm;
}

void clip_grad_norm(std::span<Reducer* const> reducers, double max_norm, TensorView norm) {
  check_clip(reducers, max_norm);
  if (reducers.empty()) throw UsageError("reducer: clip_grad_norm: expected Reducers, got none");
  Reducer::Core& first = *reducers.front()->core_;
  first.require_output(norm, Dtype::kF64, 1, "clip_grad_norm");
  if (norm.device.type == DeviceType::kHost) {
    *static_cast<double*>(norm.data) = clip_grad_norm(reducers, max_norm);
    return;
  }
  const Stream stream = first.caller();
  const Scratch words((reducers.size() + 1) * sizeof(double), stream);
  auto* const squares = reinterpret_cast<double*>(words.data());
  auto* const factor = reinterpret_cast<float*>(squares + reducers.size());
  for (std::size_t i = 0; i < reducers.size(); ++i) {
    reducers[i]->core_->set_stream(stream);
    reducers[i]->core_->squared_norm(squares + i);
  }
  const auto count = static_cast<std::int64_t>(reducers.size());
  kernels::clip_factor(
      {squares, count, max_norm, kClipEpsilon, static_cast<double*>(norm.data), factor}, stream);
  for (Reducer* reducer : reducers) reducer->core_->scale_shards(factor);
}

Step::Step(Reducer& reducer) : reducer_(reducer), exceptions_(std::uncaught_exceptions()) {
  reducer.begin_step();
}

Step::~Step() {
  if (std::uncaught_exceptions() > exceptions_) {
    reducer_.abandon_step("its block raised an exception");
  }
}

Microbatch::Microbatch(Reducer& reducer, const MicrobatchOptions& options) : reducer_(&reducer) {
  reducer.begin_microbatch(options);
}

Microbatch::~Microbatch() {
  if (reducer_ != nullptr) reducer_->abandon_step("its block raised an exception");
}

void Microbatch::end() {
  if (reducer_ == nullptr) throw UsageError("reducer: microbatch: expected one end(), got another");
  std::exchange(reducer_, nullptr)->end_microbatch();
}

}  // namespace hsdp
