#include "hsdp/reducer/core.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

std::string text_of(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

// Results are divided by the product in fp32: beyond its range all would be zero or infinite.
void check_divisor(const std::optional<double>& factor, double scale) {
  const auto divisor = static_cast<float>(factor.value_or(1.0) * scale);
  if (std::isnormal(divisor) && std::isnormal(1.0F / divisor)) return;
  throw UsageError(
      "reducer: divide factor times loss scale: expected a product that fp32 and its reciprocal "
      "hold, got " +
      (factor ? text_of(*factor) : std::string("the default")) + " times " + text_of(scale));
}

}  // namespace

Reducer::Core::Core(const Mesh& mesh, ReducerOptions options)
    : mesh_(mesh),
      options_(std::move(options)),
      parameters_(options_),
      caller_(Stream::borrow(mesh.device(), nullptr)) {
  if (!options_.replica_hop) options_.replica_hop = plain_hop();
  if (!options_.bucket_bytes) {
    const bool on_host = mesh_.device().type == DeviceType::kHost;
    options_.bucket_bytes = on_host ? kHostBucketBytes : kGpuBucketBytes;
  }
  world_ = mesh_.world();
  id_ = world_.next_exchange_key();
  compare_options();
  shard_group_ = mesh_.shard_group().split(0, mesh_.shard_rank());
  replicate_group_ = mesh_.replicate_group().split(0, mesh_.replica());
}

Reducer::Core::~Core() {
  if (state_ == State::kCollecting) abandon_microbatch("the Reducer was destroyed");
  if (pipeline_) pipeline_->drain();  // its tasks use the rest of this
  if (pipeline_ && mesh_.device().type != DeviceType::kHost) {
    try {
      world_.wait(caller_.record());  // which may still read a result
    } catch (...) {                   // the caller's own error
    }
  }
}

int Reducer::Core::register_parameter(const ParameterSpec& spec) {
  check_usable("register_parameter");
  if (layout_) {
    throw UsageError("reducer: register_parameter('" + spec.name +
                     "'): expected all registrations before the first microbatch; make another "
                     "Reducer for parameters that come later");
  }
  return parameters_.add(spec);
}

void Reducer::Core::each_group(const std::optional<std::string>& group,
                               const std::function<void(reducer::SyncFlags&)>& apply) {
  check_usable("set_requires_gradient_sync");
  require_state(State::kIdle, "set_requires_gradient_sync and set_requires_all_reduce");
  flags_.resize(static_cast<std::size_t>(std::max(1, parameters_.group_count())));
  if (group) {
    apply(flags_[static_cast<std::size_t>(parameters_.find_group(*group))]);
  } else {
    for (reducer::SyncFlags& flags : flags_) apply(flags);
  }
}

void Reducer::Core::set_requires_gradient_sync(bool flag, const std::optional<std::string>& group) {
  each_group(group, [flag](reducer::SyncFlags& f) { f.gradient_sync = f.all_reduce = flag; });
}

void Reducer::Core::set_requires_all_reduce(bool flag, const std::optional<std::string>& group) {
  each_group(group, [flag](reducer::SyncFlags& f) { f.all_reduce = flag; });
}

void Reducer::Core::set_gradient_divide_factor(std::optional<double> factor) {
  check_usable("set_gradient_divide_factor");
  require_state(State::kIdle, "set_gradient_divide_factor");
  if (factor && (!std::isfinite(*factor) || *factor == 0)) {
    throw UsageError(
        "reducer: set_gradient_divide_factor: expected a finite factor other than 0, got " +
        std::to_string(*factor));
  }
  check_divisor(factor, loss_scale_);
  divide_factor_ = factor;
}

void Reducer::Core::set_loss_scale(double scale) {
  check_usable("set_loss_scale");
  require_state(State::kIdle, "set_loss_scale");
  if (!std::isfinite(scale) || scale <= 0) {
    throw UsageError("reducer: set_loss_scale: expected a finite scale above 0, got " +
                     std::to_string(scale));
  }
  if (pending()) {
    throw UsageError(
        "reducer: set_loss_scale: expected a call between steps, got one while microbatches are "
        "pending; call it after the step, finish() or discard()");
  }
  check_divisor(divide_factor_, scale);
  loss_scale_ = scale;
}

// Packing ahead needs a core for the thread that waits, beside those that reduce; a GPU does both.
reducer::PackOrder Reducer::Core::pack_order() const {
  if (mesh_.device().type != DeviceType::kHost) return reducer::PackOrder::kAhead;
  cpu_set_t cores;
  const bool known = ::sched_getaffinity(0, sizeof cores, &cores) == 0;
  return known && CPU_COUNT(&cores) <= mesh_.shard_size() ? reducer::PackOrder::kInTurn
                                                          : reducer::PackOrder::kAhead;
}

// Lays out the buckets and takes the memory, once, when the first microbatch begins.
void Reducer::Core::freeze() {
  if (layout_) return;
  compare_registrations();
  flags_.resize(static_cast<std::size_t>(parameters_.group_count()));
  groups_.resize(flags_.size());
  const std::vector<LayoutParameter> layout_parameters = parameters_.layout_parameters();
  layout_.emplace(layout_parameters, mesh_.shard_size(), options_.layout, *options_.bucket_bytes);
  memory_.emplace(parameters_, *layout_, shard_group_, replicate_group_, mesh_.device(),
                  options_.accumulate_dtype);
  pipeline_.emplace(reducer::BucketPipeline::Parts{
      *layout_, *memory_, outcome_, mesh_.device(), shard_group_, replicate_group_,
      options_.replica_hop, options_.replica_dtype,
      options_.reduction == "native" ? Reduction::kNative : Reduction::kExact,
      mesh_.device().type == DeviceType::kHost ? nullptr : IssueOrder::of(world_)->add_lane(),
      [this](int slot, const Event& free) { collector_->slot_free(slot, free); }});
  const auto launch = [this](int bucket, int slot, const Event& packed) {
    const int group = layout_->buckets()[static_cast<std::size_t>(bucket)].group;
    pipeline_->launch({bucket, slot, launches_[static_cast<std::size_t>(group)], epoch_, packed,
                       step_->nonfinite});
  };
  collector_.emplace(reducer::Collector::Parts{
      parameters_, *layout_, *memory_, mesh_.device(),
      reducer::Collector::Options{options_.backwards == Backwards::kMany, pack_order()}, launch,
      [this](std::exception_ptr error) { outcome_.fail(std::move(error)); },
      [this](const Event& event) { world_.wait(event); }});
  outcome_.set_on_change([this] { collector_->notify(); });
}

void Reducer::Core::set_stream(const Stream& stream) {
  if (!(stream.device() == mesh_.device())) {
    throw UsageError("reducer: set_stream: expected a stream of " + to_string(mesh_.device()) +
                     ", got one of " + to_string(stream.device()));
  }
  caller_ = stream;
}

void Reducer::Core::check_usable(std::string_view call) {
  if (state_ == State::kClosed) {
    throw UsageError("reducer: " + std::string(call) + ": the Reducer was closed; make a new one");
  }
  raise_failure();
  raise_abort();
}

// Repeats the failure that ended the Reducer. Kept gradients are let go first: their memory is the
// caller's again once this throws.
void Reducer::Core::raise_failure() {
  if (!outcome_.failed()) return;
  if (state_ == State::kCollecting) {
    collector_->drop();
    state_ = State::kIdle;
  }
  outcome_.rethrow_failure();
}

// Raises a step that another rank dropped, once; this rank is idle and usable after it.
void Reducer::Core::raise_abort() {
  const std::optional<reducer::Outcome::Abort> abort = outcome_.take_abort();
  if (!abort) return;
  if (state_ == State::kCollecting) {
    collector_->drop();
    state_ = State::kIdle;
  }
  step_number_ = abort->step;
  epoch_ = abort->through_epoch;
  drop_step();
  std::rethrow_exception(abort->error);
}

void Reducer::Core::require_state(State expected, std::string_view call) const {
  if (state_ == expected) return;
  throw UsageError("reducer: " + std::string(call) +
                   (expected == State::kIdle
                        ? ": expected no open microbatch, got one; call end_microbatch first"
                        : ": expected an open microbatch, got none; call begin_microbatch first"));
}

void Reducer::Core::close() {
  if (state_ == State::kClosed) return;
  if (state_ == State::kCollecting) abandon_microbatch("the Reducer was closed");
  state_ = State::kClosed;
  try {
    if (collector_) world_.wait(collector_->packed());
    if (pipeline_) pipeline_->wait_idle();
  } catch (const RankError&) {  // the world's end, which every other call says
  }
  snapshots_.flush();
}

ReducerStats Reducer::Core::stats() const {
  ReducerStats s;
  s.microbatch_count = microbatch_total_;
  s.step_count = step_total_;
  s.begun_step_count = step_number_ + 1;
  s.all_gather_count = all_gather_count_;
  s.engine = world_.engine_name();
  s.reduction = options_.reduction;
  s.replica_hop = options_.replica_hop->name();
  s.shard_transport = name(shard_group_.transport());
  s.replica_transport = name(replicate_group_.transport());
  s.replica_hop_state_bytes = static_cast<std::int64_t>(options_.replica_hop->resident_bytes());
  s.snapshot_bytes = static_cast<std::int64_t>(snapshots_.pending_bytes());
  if (layout_) {
    s.bucket_count = static_cast<int>(std::ranges::count_if(
        layout_->buckets(), [](const Bucket& bucket) { return bucket.rows.count() > 0; }));
    const reducer::HopCounts& counts = pipeline_->counts();
    s.reduce_scatter_count = counts.reduce_scatter_count;
    s.all_reduce_count = counts.all_reduce_count;
    s.shard_hop_bytes = counts.shard_hop_bytes;
    s.replica_hop_bytes = counts.replica_hop_bytes;
    s.carry_bytes = memory_->carry_bytes();
    s.total_bytes = memory_->total_bytes();
    s.staging_bytes = memory_->staging_bytes();
    s.accumulator_bytes = memory_->accumulator_bytes();
    s.retained_bytes = collector_->retained_bytes();
    s.peak_retained_bytes = collector_->peak_retained_bytes();
  }
  s.resident_bytes = s.carry_bytes + s.total_bytes + s.staging_bytes + s.accumulator_bytes +
                     s.replica_hop_state_bytes + s.snapshot_bytes;
  peak_resident_bytes_ = std::max(peak_resident_bytes_, s.resident_bytes);
  s.peak_resident_bytes = peak_resident_bytes_;
  return s;
}

}  // namespace hsdp
