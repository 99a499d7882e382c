// Microbatches, finish and discard, as the caller's thread runs them.
#include <algorithm>
#include <utility>

#include "hsdp/comm/engine.h"
#include "hsdp/divide_factors.h"
#include "hsdp/error.h"
#include "hsdp/kernels/cast_and_pack.h"
#include "hsdp/reducer/core.h"

namespace hsdp {

void Reducer::Core::begin_step() {
  check_usable("step");
  ledger_.require_idle("step");
  freeze();
  if (!ledger_.begun()) wait_for_words();
  ledger_.begin_step();
}

void Reducer::Core::begin_microbatch(const MicrobatchOptions& options) {
  check_usable("begin_microbatch");
  ledger_.require_idle("begin_microbatch");
  freeze();
  const std::vector<Sync> sync = ledger_.sync_of(options);
  // How a step ended is known before the next one begins; within a step nobody waits here.
  if (!ledger_.begun()) wait_for_words();
  open(ledger_.begin(sync));
}

void Reducer::Core::open(reducer::MicrobatchPlan plan) {
  try {
    prepare(std::move(plan));
  } catch (const std::exception& error) {  // no memory
    if (ledger_.phase() == Phase::kCollecting) drop_step(error.what(), false);
    throw;
  }
  outcome_->open_faults();
  try {
    frozen_->collector().begin(plan_);
  } catch (...) {
    outcome_->fail(std::current_exception());
    throw;
  }
}

// What the microbatch needs, some of which this rank may not get.
void Reducer::Core::prepare(reducer::MicrobatchPlan plan) {
  if (plan.begins_step) {
    result_ = std::make_shared<reducer::StepResult>();
    result_->nonfinite = make_flag(mesh_.device());
    frozen_->collector().clear_accumulators();
  }
  plan.result = result_;
  plan.replica_dtype = options_.replica_dtype;
  plan_ = std::make_shared<const reducer::MicrobatchPlan>(std::move(plan));
  reducer::GradientMemory& memory = frozen_->memory();
  if (plan_->has(Sync::kNone) || options_.backwards == Backwards::kMany) {
    memory.require_accumulators();
  }
  if (plan_->has(Sync::kAll) && !plan_->ends_step) memory.require_totals();
  order_packs();
}

// Packs come after whatever still uses what they write to.
void Reducer::Core::order_packs() {
  reducer::BucketPipeline& pipeline = frozen_->pipeline();
  reducer::Collector& collector = frozen_->collector();
  if (!plan_->is_local()) {
    if (mesh_.shard_size() == 1) {
      // Gradients go straight into the carry, which a hop may still read.
      pipeline.wait_launched();
      raise_failure("begin_microbatch");
      collector.wait_for(pipeline.done());
    } else {
      pipeline.join_streams();
    }
  }
  if (std::exchange(zeros_sent_, false)) collector.wait_for(pipeline.done());
  // Results of the last step are read before the carry changes: hops come after packs.
  collector.wait_for(caller_.record());
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
  outcome_->rethrow_failure("gradient_ready");
  outcome_->rethrow_drop();
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
  std::exception_ptr fault = std::make_exception_ptr(UsageError(message));
  outcome_->note_fault(fault);
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
  if (options_.missing == Missing::kError) {
    if (const std::string missing = missing_message(); !missing.empty()) note_fault(missing);
  }
  if (plan_->is_local()) {
    close_local_collection();
  } else {
    close_collection("microbatch");
  }
}

// Sends nothing and says nothing: the next word's microbatch number covers it.
void Reducer::Core::close_local_collection() {
  reducer::Collector& collector = frozen_->collector();
  collector.fill_holes();
  raise_failure("end_microbatch");
  collector.end();
  if (const std::exception_ptr fault = outcome_->settle_faults()) {
    drop_step(reducer::text_of(fault), false);
    std::rethrow_exception(fault);
  }
  ledger_.end(*plan_);
}

void Reducer::Core::close_collection(std::string_view call) {
  reducer::Collector& collector = frozen_->collector();
  wait_until_judged();
  const std::exception_ptr fault = outcome_->settle_faults();
  if (fault) {
    drop_step(reducer::text_of(fault), true);
    std::rethrow_exception(fault);
  }
  raise_drop();
  // The word goes out before the packs are done, so that peers in another sync mode find out while
  // this rank still waits for them.
  const std::int64_t word = post(call, *plan_, {}, true);
  collector.fill_holes();
  collector.pack_until([&] { return collector.all_packed() || outcome_->failed(); });
  raise_failure("end_microbatch");
  collector.end();
  end_words(word, *plan_);
  ledger_.end(*plan_);
}

void Reducer::Core::abandon_step(std::string_view reason) noexcept {
  if (ledger_.phase() == Phase::kClosed) return;
  try {
    raise_failure("abandon_step");
    if (!ledger_.begun()) return;
    drop_step(std::string(reason), ledger_.phase() == Phase::kCollecting && !plan_->is_local());
  } catch (...) {  // the caller's own exception matters more; a failure repeats at the next call
    if (!outcome_->failed()) outcome_->fail(std::current_exception());
  }
  if (ledger_.phase() == Phase::kCollecting) ledger_.drop();
}

// [Note: dropped step]
void Reducer::Core::drop_step(const std::string& reason, bool sends) {
  reducer::Collector& collector = frozen_->collector();
  std::vector<int> unsent;
  if (ledger_.phase() == Phase::kCollecting) unsent = collector.drop();
  const std::exception_ptr fault = outcome_->settle_faults();  // after the last pack
  std::string text = fault ? reducer::text_of(fault) : reason;
  if (text.empty()) text = "no reason was given";
  wait_until_judged();
  if (outcome_->take_drop()) return forget_step();  // another rank was first
  if (!sends) {
    const reducer::MicrobatchPlan plan = ledger_.plan_of_step();
    const std::int64_t word = post(reducer::kDropCall, plan, text, false);
    forget_step();
    frozen_->pipeline().end_drop({.word = word, .step = plan.step});
    return;
  }
  // Peers wait for what is not sent yet.
  const std::int64_t word = post(plan_->fresh ? "microbatch" : "finish", *plan_, text, true);
  for (const int bucket : unsent) {
    frozen_->pipeline().launch_zeros(bucket, plan_, collector.packed());
  }
  end_words(word, *plan_);
  forget_step();
}

// As it was before the step, but for the number of the next one.
void Reducer::Core::forget_step() {
  reducer::Collector& collector = frozen_->collector();
  if (ledger_.phase() == Phase::kCollecting) static_cast<void>(collector.drop());
  ledger_.drop();
  collector.clear_accumulators();
  zeros_sent_ = true;
}

// At most one word is under way: a rank that could not know that the step was dropped must not
// speak about the microbatch that followed.
void Reducer::Core::wait_until_judged() {
  frozen_->collector().pack_until(
      [this] { return !agreement_->under_way() || outcome_->failed(); });
  raise_failure("status word");
}

void Reducer::Core::wait_for_words() {
  wait_until_judged();
  raise_drop();
}

// `reason`: why this rank drops the step, empty when it does not.
std::int64_t Reducer::Core::post(std::string_view call, const reducer::MicrobatchPlan& plan,
                                 const std::string& reason, bool sends) {
  reducer::StatusWord word;
  word.call = call;
  word.step = plan.step;
  word.microbatch = plan.microbatch;
  if (sends) word.groups = plan.groups;
  word.divide_factor = plan.divide_factor.value_or(0.0);
  word.loss_scale = plan.loss_scale;
  word.dropped = !reason.empty();
  word.reason = reason;
  return agreement_->post(word);
}

void Reducer::Core::end_words(std::int64_t word, const reducer::MicrobatchPlan& plan) {
  frozen_->pipeline().end(
      {.word = word, .step = plan.step, .ends_step = plan.ends_step, .result = result_});
}

void Reducer::Core::finish() {
  check_usable("finish");
  ledger_.require_idle("finish");
  if (!ledger_.pending()) {
    if (frozen_) wait_for_words();
    return;
  }
  open(ledger_.begin_finish());
  close_collection("finish");
  wait_idle();
}

void Reducer::Core::discard() {
  if (ledger_.phase() == Phase::kClosed) check_usable("discard");
  raise_failure("discard");
  ledger_.require_idle("discard");
  if (!ledger_.begun()) return raise_drop();
  wait_until_judged();
  if (outcome_->take_drop()) return forget_step();
  if (!ledger_.pending()) return;
  const reducer::MicrobatchPlan plan = ledger_.plan_of_step();
  const std::int64_t word = post("discard", plan, {}, false);
  frozen_->pipeline().end(
      {.word = word, .step = plan.step, .discards_step = true, .result = result_});
  forget_step();
}

}  // namespace hsdp
