#include "hsdp/reducer/core.h"

#include <algorithm>
#include <utility>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/error.h"
#include "hsdp/reducer/together.h"

namespace hsdp {
Reducer::Core::Core(const Mesh& mesh, ReducerOptions options)
    : mesh_(mesh),
      options_(std::move(options)),
      parameters_(options_),
      ledger_(mesh.shard_size(), mesh.replicate_size()),
      caller_(Stream::borrow(mesh.device(), nullptr)) {
  if (!options_.replica_hop) options_.replica_hop = std::make_shared<PlainHop>();
  if (!options_.bucket_bytes) {
    const bool on_host = mesh_.device().type == DeviceType::kHost;
    options_.bucket_bytes = on_host ? kHostBucketBytes : kGpuBucketBytes;
  }
  world_ = mesh_.world();
  outcome_.emplace(world_);
  agreement_.emplace(world_, world_.next_exchange_key());
  compare_options();
  reducer::together(world_, "make its shard group",
                    [&] { shard_group_ = mesh_.shard_group().split(0, mesh_.shard_rank()); });
  reducer::together(world_, "make its replicate group",
                    [&] { replicate_group_ = mesh_.replicate_group().split(0, mesh_.replica()); });
}

Reducer::Core::~Core() {
  agreement_->stop_waiting();
  abandon_step("the Reducer was destroyed");
  if (frozen_) frozen_->pipeline().drain();  // its tasks use the rest of this
  if (frozen_ && mesh_.device().type != DeviceType::kHost) {
    try {
      world_.wait(caller_.record());  // which may still read a result
    } catch (...) {                   // the caller's own error
    }
  }
}

int Reducer::Core::register_parameter(const ParameterSpec& spec) {
  check_usable("register_parameter");
  if (frozen_) {
    throw UsageError("reducer: register_parameter('" + spec.name +
                     "'): expected all registrations before the first microbatch; make another "
                     "Reducer for parameters that come later");
  }
  return parameters_.add(spec);
}

std::optional<int> Reducer::Core::find_group(const std::optional<std::string>& group) {
  check_usable("set_requires_gradient_sync");
  ledger_.set_group_count(parameters_.group_count());
  return group ? std::optional(parameters_.find_group(*group)) : std::nullopt;
}

void Reducer::Core::set_requires_gradient_sync(bool flag, const std::optional<std::string>& group) {
  ledger_.set_requires_gradient_sync(flag, find_group(group));
}

void Reducer::Core::set_requires_all_reduce(bool flag, const std::optional<std::string>& group) {
  ledger_.set_requires_all_reduce(flag, find_group(group));
}

void Reducer::Core::set_gradient_divide_factor(std::optional<double> factor) {
  check_usable("set_gradient_divide_factor");
  ledger_.set_gradient_divide_factor(factor);
}

void Reducer::Core::set_loss_scale(double scale) {
  check_usable("set_loss_scale");
  ledger_.set_loss_scale(scale);
}

// Once, when the first microbatch begins.
void Reducer::Core::freeze() {
  if (frozen_) return;
  try {
    frozen_ = std::make_unique<reducer::Frozen>(
        reducer::FrozenSetting{parameters_, options_, mesh_.device(), world_, shard_group_,
                               replicate_group_, *outcome_, *agreement_});
  } catch (const RankError&) {
    if (world_.engine()->control().failed()) outcome_->fail(std::current_exception());
    throw;
  }
  ledger_.set_group_count(parameters_.group_count());
}

void Reducer::Core::set_stream(const Stream& stream) {
  if (!(stream.device() == mesh_.device())) {
    throw UsageError("reducer: set_stream: expected a stream of " + to_string(mesh_.device()) +
                     ", got one of " + to_string(stream.device()));
  }
  caller_ = stream;
}

void Reducer::Core::check_usable(std::string_view call) {
  if (ledger_.phase() == Phase::kClosed) {
    throw UsageError("reducer: " + std::string(call) + ": the Reducer was closed; make a new one");
  }
  raise_failure(call);
  raise_drop();
}

// Repeats the failure that ended the Reducer. Kept gradients are let go first: their memory is the
// caller's again once this throws.
void Reducer::Core::raise_failure(std::string_view call) {
  try {
    outcome_->rethrow_failure(call);
  } catch (...) {
    if (ledger_.phase() == Phase::kCollecting) {
      static_cast<void>(frozen_->collector().drop());
      ledger_.drop();
    }
    throw;
  }
}

// Raises a step that another rank dropped, once; this rank is idle and usable after it.
void Reducer::Core::raise_drop() {
  if (const std::exception_ptr error = outcome_->take_drop()) {
    forget_step();
    std::rethrow_exception(error);
  }
}

void Reducer::Core::close() {
  if (ledger_.phase() == Phase::kClosed) return;
  agreement_->stop_waiting();
  abandon_step("the Reducer was closed");
  ledger_.close();
  try {
    if (frozen_) {
      world_.wait(frozen_->collector().packed());
      frozen_->pipeline().wait_idle();
    }
  } catch (const RankError&) {  // the world's end, which every other call says
  }
  snapshots_.flush();
}

ReducerState Reducer::Core::state() const {
  ReducerState state;
  state.phase = ledger_.phase() == Phase::kClosed       ? ReducerState::Phase::kClosed
                : outcome_->failed()                    ? ReducerState::Phase::kFailed
                : ledger_.phase() == Phase::kCollecting ? ReducerState::Phase::kCollecting
                                                        : ReducerState::Phase::kIdle;
  state.step = ledger_.counts().begun_steps - 1;
  state.step_begun = ledger_.begun();
  state.microbatch = ledger_.microbatch();
  state.pending = ledger_.pending();
  return state;
}

ReducerStats Reducer::Core::stats() const {
  ReducerStats s;
  const reducer::StepLedger::Counts counts = ledger_.counts();
  s.microbatch_count = counts.microbatches;
  s.step_count = counts.steps;
  s.begun_step_count = counts.begun_steps;
  s.all_gather_count = all_gather_count_;
  s.control_message_count = agreement_->message_count();
  s.engine = world_.engine_name();
  s.reduction = options_.reduction;
  s.replica_hop = options_.replica_hop->name();
  s.shard_transport = name(shard_group_.transport());
  s.replica_transport = name(replicate_group_.transport());
  s.replica_hop_state_bytes = static_cast<std::int64_t>(options_.replica_hop->resident_bytes());
  s.snapshot_bytes = static_cast<std::int64_t>(snapshots_.pending_bytes());
  if (frozen_) {
    s.bucket_count = static_cast<int>(std::ranges::count_if(
        frozen_->layout().buckets(), [](const Bucket& bucket) { return bucket.rows.count() > 0; }));
    const reducer::HopCounts& hops = frozen_->pipeline().counts();
    s.reduce_scatter_count = hops.reduce_scatter_count;
    s.all_reduce_count = hops.all_reduce_count;
    s.shard_hop_bytes = hops.shard_hop_bytes;
    s.replica_hop_bytes = hops.replica_hop_bytes;
    const reducer::GradientMemory& memory = frozen_->memory();
    s.carry_bytes = memory.carry_bytes();
    s.total_bytes = memory.total_bytes();
    s.staging_bytes = memory.staging_bytes();
    s.accumulator_bytes = memory.accumulator_bytes();
    s.retained_bytes = frozen_->collector().retained_bytes();
    s.peak_retained_bytes = frozen_->collector().peak_retained_bytes();
  }
  s.resident_bytes = s.carry_bytes + s.total_bytes + s.staging_bytes + s.accumulator_bytes +
                     s.replica_hop_state_bytes + s.snapshot_bytes;
  peak_resident_bytes_ = std::max(peak_resident_bytes_, s.resident_bytes);
  s.peak_resident_bytes = peak_resident_bytes_;
  return s;
}

}  // namespace hsdp
