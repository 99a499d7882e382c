// Microbatches, finish and discard, as the caller's thread runs them.
#include <algorithm>
#include <utility>

#include "hsdp/comm/engine.h"
#include "hsdp/divide_factors.h"
#include "hsdp/error.h"
#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/reducer/core.h"

namespace hsdp {

void Reducer::Core::begin_microbatch(const MicrobatchOptions& options) {
  check_usable("begin_microbatch");
  ledger_.require_idle("begin_microbatch");
  freeze();
  const std::vector<Sync> sync = ledger_.sync_of(options);
  // How a step ended is known before the next one begins; within a step nobody waits here.
  if (!ledger_.pending()) wait_for_words();
  open(ledger_.begin(sync));
}

void Reducer::Core::open(reducer::MicrobatchPlan plan) {
  try {
    collect(std::move(plan));
  } catch (...) {  // no memory: the others would wait for this rank's buckets
    ledger_.drop();
    outcome_->fail(std::current_exception());
    throw;
  }
}

void Reducer::Core::collect(reducer::MicrobatchPlan plan) {
  if (plan.begins_step) {
    step_ = std::make_shared<Step>();
    step_->number = plan.step;
    step_->nonfinite = make_flag(mesh_.device());
    frozen_->collector().clear_accumulators();
  }
  plan.nonfinite = step_->nonfinite;
  plan.replica_dtype = options_.replica_dtype;
  plan_ = std::make_shared<const reducer::MicrobatchPlan>(std::move(plan));
  reducer::GradientMemory& memory = frozen_->memory();
  if (plan_->has(Sync::kNone) || options_.backwards == Backwards::kMany) {
    memory.require_accumulators();
  }
  if (plan_->has(Sync::kAll) && !plan_->ends_step) memory.require_totals();
  if (mesh_.shard_size() == 1) {
    // Gradients go straight into the carry, which a hop may still read.
    frozen_->pipeline().wait_launched();
    raise_failure();
    frozen_->collector().wait_for(frozen_->pipeline().done());
  } else {
    frozen_->pipeline().join_streams();
  }
  // Results of the last step are read before the carry changes: hops come after packs.
  frozen_->collector().wait_for(caller_.record());
  fault_.clear();
  frozen_->collector().begin(plan_);
}

void Reducer::Core::check_gradient(int parameter, const StridedView& gradient) const {
  if (parameter < 0 || parameter >= parameters_.size()) {
    throw UsageError("reducer: gradient_ready: expected a parameter index below " +
                     std::to_string(parameters_.size()) + ", got " + std::to_string(parameter));
  }
  const ParameterSpec& spec = parameters_.spec(parameter);
  const auto fault = [&spec](const std::string& expected, const std::string& got) {
    throw UsageError("reducer: gradient of '" + spec.name + "': expected " + expected + ", got " +
                     got);
  };
  if (gradient.shape != spec.shape) {
    fault("shape " + to_string(spec.shape), to_string(gradient.shape));
  }
  if (gradient.dtype != spec.dtype) {
    fault("dtype " + std::string(name(spec.dtype)) + " as registered",
          std::string(name(gradient.dtype)));
  }
  if (!(gradient.device == mesh_.device())) {
    fault("memory on " + to_string(mesh_.device()) + ", the mesh's device",
          to_string(gradient.device) + "; move it there, or make the mesh with its device");
  }
  if (!gradient.strides.empty() && gradient.strides.size() != gradient.shape.size()) {
    fault(std::to_string(gradient.shape.size()) + " strides",
          std::to_string(gradient.strides.size()));
  }
  if (gradient.data == nullptr && gradient.count() > 0) fault("memory", "a null pointer");
  kernels::require_packable(gradient);
}

void Reducer::Core::gradient_ready(int parameter, const StridedView& gradient,
                                   reducer::GradientOwner owner,
                                   const std::optional<Event>& produced) {
  if (ledger_.phase() == Phase::kClosed) check_usable("gradient_ready");
  outcome_->rethrow_failure();
  outcome_->rethrow_abort();
  ledger_.require_collecting("gradient_ready");
  try {
    check_gradient(parameter, gradient);
    if (!frozen_->collector().arrive(parameter, gradient, std::move(owner),
                                     produced ? *produced : caller_.record())) {
      throw UsageError("reducer: gradient of '" + parameters_.spec(parameter).name +
                       "': expected one gradient per microbatch, got a second one; use "
                       "backwards=\"many\" for several backward passes in a microbatch");
    }
  } catch (const UsageError& error) {
    note_fault(error.what());
    throw;
  }
}

Event Reducer::Core::packed() { return frozen_ ? frozen_->collector().packed() : Event(); }

std::vector<Stream> Reducer::Core::pack_streams() const {
  if (frozen_) return frozen_->collector().pack_streams();
  throw UsageError(
      "reducer: pack_streams: expected a microbatch before it, got none; call begin_microbatch "
      "first");
}

int Reducer::Core::find_in_microbatch(std::string_view name) {
  try {
    return parameters_.find(name);
  } catch (const UsageError& error) {
    if (ledger_.phase() == Phase::kCollecting) note_fault(error.what());
    throw;
  }
}

void Reducer::Core::reject_gradient(std::string_view message) {
  if (ledger_.phase() == Phase::kCollecting) note_fault(std::string(message));
}

// The first error of this rank's own; end_microbatch raises it again and drops the step.
void Reducer::Core::note_fault(const std::string& message) {
  const std::scoped_lock lock(fault_mutex_);
  if (fault_.empty()) fault_ = message;
}

std::string Reducer::Core::missing_message() const {
  const std::vector<int> missing = frozen_->collector().missing();
  if (missing.empty()) return {};
  std::string names = "'" + parameters_.spec(missing.front()).name + "'";
  if (missing.size() > 1) names += " and " + std::to_string(missing.size() - 1) + " more";
  return "reducer: end_microbatch: expected a gradient for every parameter, got none for " + names +
         " (rank " + std::to_string(mesh_.rank()) + " of " + std::to_string(mesh_.size()) +
         "); use missing=\"zero\" when parameters may go unused";
}

void Reducer::Core::end_microbatch() {
  check_usable("end_microbatch");
  ledger_.require_collecting("end_microbatch");
  if (fault_.empty() && options_.missing == Missing::kError) fault_ = missing_message();
  const std::string fault = fault_;
  close_collection({"microbatch", plan_, !fault.empty(), fault});
  if (!fault.empty()) throw UsageError(fault);
}

void Reducer::Core::abandon_microbatch(std::string_view reason) noexcept {
  if (ledger_.phase() != Phase::kCollecting) return;
  try {
    raise_failure();
    raise_abort();
    close_collection({"microbatch", plan_, true, fault_.empty() ? std::string(reason) : fault_});
  } catch (...) {  // the caller's own exception matters more; a failure repeats at the next call
  }
  if (ledger_.phase() == Phase::kCollecting) ledger_.drop();
}

void Reducer::Core::close_collection(const Closing& closing) {
  reducer::Collector& collector = frozen_->collector();
  wait_for_words();
  // The word goes out before the packs are done, so that peers in another sync mode find out while
  // this rank still waits for them.
  post_word(closing);
  if (closing.abandoned) collector.release_gradients();
  collector.fill_holes();
  collector.pack_until([&] { return collector.all_packed() || outcome_->failed(); });
  raise_failure();
  collector.end();
  enqueue_end_task(closing);
  if (closing.abandoned) {
    drop_step();
  } else {
    ledger_.end(*closing.plan);
  }
}

// At most one word is under way: a rank that could not know that the step was dropped must not
// speak about the microbatch that followed.
void Reducer::Core::wait_for_words() {
  frozen_->collector().pack_until(
      [this] { return words_in_ >= word_sequence_ || outcome_->failed(); });
  raise_failure();
  raise_abort();
}

void Reducer::Core::post_word(const Closing& closing) {
  const reducer::MicrobatchPlan& plan = *closing.plan;
  reducer::StatusWord word;
  word.call = closing.call;
  word.step = plan.step;
  word.microbatch = plan.microbatch;
  word.sync = plan.sync_text();
  word.divide_factor = plan.divide_factor.value_or(0.0);
  word.loss_scale = plan.loss_scale;
  word.abandoned = closing.abandoned;
  word.reason = closing.reason;
  ++word_sequence_;
  world_.post(key("word", word_sequence_), word.encode());
}

void Reducer::Core::enqueue_end_task(const Closing& closing) {
  EndTask task;
  task.step = step_;
  task.sequence = word_sequence_;
  task.epoch = closing.plan->epoch;
  task.drops_step = closing.call == "discard";
  task.ends_step = closing.plan->ends_step;
  frozen_->pipeline().join_streams();
  frozen_->pipeline().run_after(reducer::BucketPipeline::Scope::kAllRanks, task.epoch,
                                [this, task] { run_end_task(task); });
}

void Reducer::Core::drop_step() {
  ledger_.drop();
  frozen_->collector().clear_accumulators();
}

void Reducer::Core::finish() {
  check_usable("finish");
  ledger_.require_idle("finish");
  if (!ledger_.pending()) {
    if (frozen_) wait_for_words();
    return;
  }
  open(ledger_.begin_finish());
  close_collection({"finish", plan_, false, {}});
  wait_idle();
}

void Reducer::Core::discard() {
  check_usable("discard");
  ledger_.require_idle("discard");
  if (!ledger_.pending()) return;
  wait_for_words();
  const Closing closing{"discard",
                        std::make_shared<const reducer::MicrobatchPlan>(ledger_.discard_plan()),
                        false,
                        {}};
  post_word(closing);
  enqueue_end_task(closing);
  drop_step();
}

}  // namespace hsdp
