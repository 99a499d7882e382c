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
  require_state(State::kIdle, "begin_microbatch");
  try {
    freeze();
  } catch (const RankError&) {
    outcome_.fail(std::current_exception());
    throw;
  }
  plan_ = reducer::plan_sync(options, flags_);
  // How a step ended is known before the next one begins; within a step nobody waits here.
  if (!pending()) wait_for_words();
  open(true);
}

void Reducer::Core::start_step() {
  step_ = std::make_shared<Step>();
  step_->number = ++step_number_;
  step_->nonfinite = make_flag(mesh_.device());
  step_state_ = StepState::kEmpty;
  microbatch_ = 0;
  std::ranges::fill(groups_, Group{});
  collector_->clear_accumulators();
}

std::vector<reducer::GroupLaunch> Reducer::Core::launches(bool fresh) const {
  const double factor =
      gradient_divide_factor(mesh_.shard_size(), mesh_.replicate_size(), true, divide_factor_);
  std::vector<reducer::GroupLaunch> result;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    reducer::GroupLaunch launch;
    launch.sync = plan_.groups[g];
    launch.fresh = fresh;
    launch.local_count = group.local_count + (fresh ? 1 : 0);
    launch.reduce = launch.local_count > 0;
    launch.accumulate = group.carry_count > 0;
    launch.carry_count = group.carry_count + launch.local_count;
    launch.adds_total = group.has_total;
    launch.final = plan_.ends_step;
    launch.divisor = fp32_divisor(factor, loss_scale_);
    result.push_back(launch);
  }
  return result;
}

void Reducer::Core::open(bool fresh) {
  if (step_state_ != StepState::kPending) start_step();
  launches_ = launches(fresh);
  const auto has = [this](Sync sync) { return std::ranges::count(plan_.groups, sync) > 0; };
  if (has(Sync::kNone) || options_.backwards == Backwards::kMany) memory_->require_accumulators();
  if (has(Sync::kAll) && !plan_.ends_step) memory_->require_totals();
  if (mesh_.shard_size() == 1) {
    pipeline_->wait_launched();  // gradients go straight into the carry, which a hop may still read
    raise_failure();
    collector_->wait_for(pipeline_->done());
  } else {
    pipeline_->join_streams();
  }
  // Results of the last step are read before the carry changes: hops come after packs.
  collector_->wait_for(caller_.record());
  ++epoch_;
  fault_.clear();
  state_ = State::kCollecting;
  collector_->begin(launches_);
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
  if (state_ == State::kClosed) check_usable("gradient_ready");
  outcome_.rethrow_failure();
  outcome_.rethrow_abort();
  require_state(State::kCollecting, "gradient_ready");
  try {
    check_gradient(parameter, gradient);
    if (!collector_->arrive(parameter, gradient, std::move(owner),
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

Event Reducer::Core::packed() { return collector_ ? collector_->packed() : Event(); }

std::vector<Stream> Reducer::Core::pack_streams() const {
  if (collector_) return collector_->pack_streams();
  throw UsageError(
      "reducer: pack_streams: expected a microbatch before it, got none; call begin_microbatch "
      "first");
}

int Reducer::Core::find_in_microbatch(std::string_view name) {
  try {
    return parameters_.find(name);
  } catch (const UsageError& error) {
    if (state_ == State::kCollecting) note_fault(error.what());
    throw;
  }
}

void Reducer::Core::reject_gradient(std::string_view message) {
  if (state_ == State::kCollecting) note_fault(std::string(message));
}

// The first error of this rank's own; end_microbatch raises it again and drops the step.
void Reducer::Core::note_fault(const std::string& message) {
  const std::scoped_lock lock(fault_mutex_);
  if (fault_.empty()) fault_ = message;
}

std::string Reducer::Core::missing_message() const {
  const std::vector<int> missing = collector_->missing();
  if (missing.empty()) return {};
  std::string names = "'" + parameters_.spec(missing.front()).name + "'";
  if (missing.size() > 1) names += " and " + std::to_string(missing.size() - 1) + " more";
  return "reducer: end_microbatch: expected a gradient for every parameter, got none for " + names +
         " (rank " + std::to_string(mesh_.rank()) + " of " + std::to_string(mesh_.size()) +
         "); use missing=\"zero\" when parameters may go unused";
}

void Reducer::Core::end_microbatch() {
  check_usable("end_microbatch");
  require_state(State::kCollecting, "end_microbatch");
  if (fault_.empty() && options_.missing == Missing::kError) fault_ = missing_message();
  const std::string fault = fault_;
  close_collection({"microbatch", !fault.empty(), fault});
  if (!fault.empty()) throw UsageError(fault);
}

void Reducer::Core::abandon_microbatch(std::string_view reason) noexcept {
  if (state_ != State::kCollecting) return;
  try {
    raise_failure();
    raise_abort();
    close_collection({"microbatch", true, fault_.empty() ? std::string(reason) : fault_});
  } catch (...) {  // the caller's own exception matters more; a failure repeats at the next call
  }
  state_ = State::kIdle;
}

void Reducer::Core::close_collection(const Closing& closing) {
  wait_for_words();
  // The word goes out before the packs are done, so that peers in another sync mode find out while
  // this rank still waits for them.
  post_word(closing);
  if (closing.abandoned) collector_->release_gradients();
  collector_->fill_holes();
  collector_->pack_until([this] { return collector_->all_packed() || outcome_.failed(); });
  raise_failure();
  collector_->end();
  enqueue_end_task(closing);
  state_ = State::kIdle;
  if (closing.abandoned) {
    drop_step();
  } else {
    count_microbatch();
    if (closing.call == "microbatch") {
      ++microbatch_;
      ++microbatch_total_;
    }
  }
}

// At most one word is under way: a rank that could not know that the step was dropped must not
// speak about the microbatch that followed.
void Reducer::Core::wait_for_words() {
  collector_->pack_until([this] { return words_in_ >= word_sequence_ || outcome_.failed(); });
  raise_failure();
  raise_abort();
}

void Reducer::Core::post_word(const Closing& closing) {
  reducer::StatusWord word;
  word.call = closing.call;
  word.step = step_->number;
  word.microbatch = microbatch_;
  word.sync = reducer::describe(plan_);
  word.divide_factor = divide_factor_.value_or(0.0);
  word.loss_scale = loss_scale_;
  word.abandoned = closing.abandoned;
  word.reason = closing.reason;
  ++word_sequence_;
  world_.post(key("word", word_sequence_), word.encode());
}

void Reducer::Core::enqueue_end_task(const Closing& closing) {
  EndTask task;
  task.step = step_;
  task.sequence = word_sequence_;
  task.epoch = epoch_;
  task.drops_step = closing.call == "discard";
  task.ends_step = !task.drops_step && plan_.ends_step;
  task.reduced = !task.drops_step &&
                 std::ranges::any_of(plan_.groups, [](Sync sync) { return sync != Sync::kNone; });
  pipeline_->join_streams();
  pipeline_->run_after(reducer::BucketPipeline::Scope::kAllRanks, epoch_,
                       [this, task] { run_end_task(task); });
}

void Reducer::Core::count_microbatch() {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const reducer::GroupLaunch& launch = launches_[g];
    Group& group = groups_[g];
    if (launch.sync == Sync::kNone) {
      group.local_count = launch.local_count;
      continue;
    }
    const bool totalled = launch.sync == Sync::kAll && !launch.final;
    group.local_count = 0;
    group.carry_count = totalled ? 0 : launch.carry_count;
    group.has_total = group.has_total || totalled;
  }
  step_state_ = plan_.ends_step ? StepState::kFinished : StepState::kPending;
  if (!plan_.ends_step) return;
  ++step_total_;
  result_factor_ =
      gradient_divide_factor(mesh_.shard_size(), mesh_.replicate_size(), true, divide_factor_);
  result_scale_ = loss_scale_;
}

void Reducer::Core::drop_step() {
  step_state_ = StepState::kEmpty;
  std::ranges::fill(groups_, Group{});
  if (collector_) collector_->clear_accumulators();
}

void Reducer::Core::finish() {
  check_usable("finish");
  require_state(State::kIdle, "finish");
  if (!pending()) {
    if (layout_) wait_for_words();
    return;
  }
  plan_.groups.assign(groups_.size(), Sync::kAll);
  plan_.ends_step = true;
  open(false);
  close_collection({"finish", false, {}});
  wait_idle();
}

void Reducer::Core::discard() {
  check_usable("discard");
  require_state(State::kIdle, "discard");
  if (!pending()) return;
  wait_for_words();
  const Closing closing{"discard", false, {}};
  post_word(closing);
  enqueue_end_task(closing);
  drop_step();
}

}  // namespace hsdp
