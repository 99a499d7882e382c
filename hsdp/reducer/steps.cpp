#include "hsdp/reducer/steps.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/engine.h"
#include "hsdp/error.h"
#include "hsdp/index_check.h"
#include "hsdp/reducer/agreed_options.h"
#include "hsdp/reducer/step_log.h"

namespace hsdp::reducer {

namespace {

WordNames word_names(const ReducerOptions& options) {
  WordNames names;
  names.component = title(options);
  return names;
}

}  // namespace

Steps::Steps(const ReducerOptions& options, const ParameterTable& parameters, Groups& groups,
             MemoryCount memory)
    : options_(options),
      parameters_(parameters),
      groups_(groups),
      memory_(std::move(memory)),
      faults_(options, parameters, groups),
      ledger_(groups.shard.size(), groups.replicate.size(), options.replica_dtype,
              options.divide_by),
      outcome_(groups.world, title(options)),
      agreement_(groups.world, groups.world.next_exchange_key(), word_names(options)),
      caller_(Stream::borrow(groups.device, nullptr)) {}

Steps::~Steps() {
  agreement_.stop_waiting();
  abandon("the Reducer was destroyed");
  if (!frozen_) return;
  frozen_->pipeline().drain();  // its tasks use the rest of this
  end_cut_steps();
  if (groups_.on_host()) return;
  try {
    groups_.world.wait(caller_.record());  // which may still read a result
  } catch (...) {                          // of the caller
  }
}

void Steps::close() {
  if (ledger_.phase() == Phase::kClosed) return;
  agreement_.stop_waiting();
  abandon("the Reducer was closed");
  ledger_.close();
  if (!frozen_) return;
  try {
    groups_.world.wait(frozen_->collector().packed());
    frozen_->pipeline().wait_idle();
  } catch (const Error&) {  // the world's end, which every other call throws
    frozen_->pipeline().drain();
  }
  end_cut_steps();
  frozen_->let_go_of_hop();
}

void Steps::end_cut_steps() noexcept {
  const std::exception_ptr failure = outcome_.refusal(kNoStep);
  try {
    const std::string cause =
        failure ? text_of(failure) : "the Reducer was closed before all ranks had ended it";
    agreement_.end_cut_steps(ledger_.counts().begun_steps, cause);
  } catch (...) {
    outcome_.fail(std::current_exception());
  }
}

void Steps::prepare() {
  if (frozen_) return;
  try {
    frozen_ = std::make_unique<Frozen>(
        FrozenSetting{parameters_, options_, groups_, outcome_, agreement_, memory_});
  } catch (const RankError&) {
    if (groups_.world.engine()->control().failed()) outcome_.fail(std::current_exception());
    throw;
  }
  ledger_.set_group_count(parameters_.group_count());
  if (groups_.replicate.size() > 1) {
    agreement_.add_party(options_.replica_hop, ledger_.counts().begun_steps);
  } else {
    options_.replica_hop->set_unused();
  }
  log_layout(options_, groups_, parameters_, frozen_->layout(), memory_);
}

void Steps::release_memory() {
  check_usable("release_memory");
  ledger_.require_idle("release_memory");
  if (ledger_.begun()) {
    throw UsageError({.where = "reducer: release_memory",
                      .expected = "a call between steps",
                      .got = "one while a step is begun",
                      .remedy = "call it after the step's last microbatch, finish() or discard()"});
  }
  if (!frozen_) return;
  wait_for_words();
  frozen_->pipeline().wait_idle();
  frozen_->collector().wait_idle();
  frozen_->memory().release();
}

void Steps::add_party(std::weak_ptr<StepParty> party) {
  check_usable("add_party");
  ledger_.require_idle("add_party");
  if (ledger_.begun()) {
    throw UsageError({.where = "reducer: add_party",
                      .expected = "a call between steps",
                      .got = "one while a step is begun",
                      .remedy = "call it before the step's first microbatch"});
  }
  // Earlier parties may still have to be told how the last step ended.
  agreement_.add_party(std::move(party), ledger_.counts().begun_steps);
}

StepLedger& Steps::ledger_for(std::string_view call) {
  check_usable(call);
  ledger_.set_group_count(parameters_.group_count());
  return ledger_;
}

void Steps::set_caller(const Stream& stream) {
  if (!(stream.device() == groups_.device)) {
    throw UsageError({.where = "reducer: set_stream",
                      .expected = "a stream of " + to_string(groups_.device),
                      .got = "one of " + to_string(stream.device())});
  }
  caller_ = stream;
}

ReducerState Steps::state() const {
  ReducerState state;
  state.phase = ledger_.phase() == Phase::kClosed       ? ReducerState::Phase::kClosed
                : outcome_.failed()                     ? ReducerState::Phase::kFailed
                : ledger_.phase() == Phase::kCollecting ? ReducerState::Phase::kCollecting
                                                        : ReducerState::Phase::kIdle;
  state.step = ledger_.counts().begun_steps - 1;
  state.step_begun = ledger_.begun();
  state.step_dropped = ledger_.dropped();
  state.microbatch = ledger_.microbatch();
  state.pending = ledger_.pending();
  state.word_under_way = agreement_.under_way();
  state.window_open = ledger_.in_window();
  return state;
}

void Steps::check_usable(std::string_view call) {
  check_failure(call);
  raise_drop();
}

void Steps::check_failure(std::string_view call) {
  if (ledger_.phase() == Phase::kClosed) {
    throw UsageError({.where = "reducer: " + std::string(call),
                      .expected = "an open Reducer",
                      .got = "a closed one",
                      .remedy = "make a new one"});
  }
  raise_failure(call);
}

void Steps::require_idle(std::string_view call) {
  if (ledger_.phase() != Phase::kIdle) check_usable(call);
  ledger_.require_idle(call);
}

// Repeats the failure that ended the Reducer. Releases kept gradients first, as the caller may free
// their memory once this throws.
void Steps::raise_failure(std::string_view call) {
  try {
    outcome_.rethrow_failure(call);
  } catch (...) {
    if (ledger_.phase() == Phase::kCollecting) {
      static_cast<void>(frozen_->collector().drop());
      ledger_.drop();
    }
    throw;
  }
}

// Throws, once, that another rank dropped the step. After it this rank is idle and usable.
void Steps::raise_drop() {
  if (std::optional<Drop> drop = outcome_.take_drop()) {
    forget_step(drop->by);
    throw_drop(std::move(*drop));
  }
}

void Steps::begin_step() {
  check_usable("step");
  ledger_.require_idle("step");
  prepare();
  if (!ledger_.begun()) wait_for_words();
  ledger_.begin_step();
}

void Steps::begin_microbatch(const MicrobatchOptions& options) {
  check_usable("begin_microbatch");
  if (ledger_.in_window()) return ledger_.begin_inside();
  ledger_.require_idle("begin_microbatch");
  prepare();
  const std::vector<Sync> sync = ledger_.sync_of(options);
  // A step begins only once the end of the last one is known. Within a step this does not wait.
  if (!ledger_.begun()) wait_for_words();
  require_meant(options);
  require_known_factor(sync, options.has_batch);
  Intake intake;
  if (options_.backwards == Backwards::kMany) {
    intake = {.most = Intake::kAnyNumber, .adds = true, .counts_differ = true};
  }
  open(ledger_.begin(sync, intake, options.has_batch), sums_dtype(std::nullopt));
}

// Drops the step on an error, so that the other ranks do not wait.
void Steps::require_meant(const MicrobatchOptions& options) {
  try {
    ledger_.require_meant(options);
  } catch (const UsageError& error) {
    if (!ledger_.begun()) ledger_.begin_step();
    drop(error.what());
    throw;
  }
}

// A hop that divides what it sends needs the factor of the whole step.
void Steps::require_known_factor(const std::vector<Sync>& sync, std::optional<bool> has_batch) {
  const auto groups = std::ranges::count(sync, Sync::kAll);
  if (groups == 0 || groups == std::ssize(sync)) return;
  if (groups_.replicate.size() == 1 || !options_.replica_hop->quantizes()) return;
  if (!ledger_.divisor().is_late(has_batch, ledger_.begun())) return;
  throw UsageError({.where = "reducer: begin_microbatch",
                    .expected = "the replica hop of all groups in the step's last microbatch, as "
                                "it divides by what was counted until then",
                    .got = "that of some groups only",
                    .remedy = "call set_gradient_divide_factor, or end the step here"});
}

void Steps::begin_window(const WindowOptions& options) {
  check_usable("begin_window");
  ledger_.require_idle("begin_window");
  if (options.backwards && *options.backwards < 1) {
    throw UsageError({.where = "reducer: begin_window",
                      .expected = "backwards of at least 1",
                      .got = std::to_string(*options.backwards)});
  }
  prepare();
  const std::vector<Sync> sync = ledger_.sync_of(options);
  if (!ledger_.begun()) wait_for_words();
  require_meant({.last = options.last, .has_batch = options.has_batch});
  require_known_factor(sync, options.has_batch);
  const AccumulateDtype dtype = sums_dtype(options.accumulate_dtype);
  Intake intake{.most = 1, .adds = false, .counts_differ = true};
  if (options.accumulate == Accumulate::kBuffer) {
    intake.most = options.backwards.value_or(Intake::kAnyNumber);
    intake.adds = true;
  }
  window_ = options;
  open(ledger_.begin_window(sync, intake, options.has_batch), dtype);
}

// That of pending local sums, else the one asked for.
AccumulateDtype Steps::sums_dtype(std::optional<AccumulateDtype> asked) const {
  if (!ledger_.has_local_sums()) return asked.value_or(options_.accumulate_dtype);
  const AccumulateDtype now = frozen_->memory().accumulate_dtype();
  if (asked && *asked != now) {
    throw UsageError({.where = "reducer: begin_window",
                      .expected = "accumulate_dtype '" + std::string(hsdp::word_of(now)) +
                                  "', as of the local sums that are pending",
                      .got = "'" + std::string(hsdp::word_of(*asked)) + "'",
                      .remedy = "give the same, or reduce them with finish() first"});
  }
  return now;
}

void Steps::open(MicrobatchPlan plan, AccumulateDtype sums_dtype) {
  plan.sums_dtype = sums_dtype;
  try {
    if (plan.begins_step) {
      result_ = std::make_shared<StepResult>();
      result_->nonfinite = frozen_->step_flag();
      frozen_->collector().clear_accumulators();
      means_.clear();
    }
    plan.result = result_;
    const bool divides_first = ask_for_means(plan) && plan.count_by != CountBy::kNothing;
    plan.packs_late = (plan.counts_differ && frozen_->sends_f16()) || divides_first;
    // A plain microbatch also has the exponents of the local sums before it.
    const bool is_handed_over = plan.intake.counts_differ && !plan.intake.adds;
    plan.intake.adds = plan.intake.adds || (plan.packs_late && !is_handed_over);
    plan_ = std::make_shared<const MicrobatchPlan>(std::move(plan));
    provide_memory();
    order_packs();
  } catch (const std::exception& error) {  // for lack of memory, or of means()
    if (ledger_.phase() == Phase::kCollecting) drop(error.what());
    throw;
  }
  outcome_.open_faults();
  try {
    frozen_->collector().begin(plan_);
  } catch (...) {
    outcome_.fail(std::current_exception());
    throw;
  }
}

// Whether a hop divides what it sends.
bool Steps::ask_for_means(MicrobatchPlan& plan) {
  if (groups_.replicate.size() == 1 || !plan.has(Sync::kAll)) return false;
  const std::vector<Bucket>& buckets = frozen_->layout().buckets();
  means_.resize(buckets.size());
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const GroupPlan& group = plan.group(buckets[b].group);
    const bool is_first = group.sync == Sync::kAll && !group.has_total;
    if (is_first) {
      means_[b] = options_.replica_hop->means(static_cast<int>(b), plan.divisor()) ? 1 : 0;
    }
    if (means_[b] != 0) ledger_.fix_divide_factor();
  }
  plan.means = means_;
  return std::ranges::count(means_, 1) > 0;
}

// Allocates what the microbatch needs; throws if that fails.
void Steps::provide_memory() {
  GradientMemory& memory = frozen_->memory();
  if (plan_->has(Sync::kNone) || plan_->intake.adds) {
    if (!memory.has_room(plan_->sums_dtype)) frozen_->collector().wait_idle();
    memory.require_accumulators(plan_->sums_dtype);
  }
  if (plan_->has(Sync::kAll) && !plan_->ends_step()) memory.require_totals();
}

// Orders packs after everything that still uses the memory they write to.
void Steps::order_packs() {
  BucketPipeline& pipeline = frozen_->pipeline();
  Collector& collector = frozen_->collector();
  if (!plan_->is_local()) {
    if (groups_.shard.size() == 1) {
      // Gradients go straight into the carry, which a hop may still read.
      pipeline.wait_launched();
      raise_failure("begin_microbatch");
      collector.wait_for(pipeline.done());
    } else {
      pipeline.join_lanes();
    }
    if (std::exchange(zeros_sent_, false)) collector.wait_for(pipeline.done());
  }
  // Hops come after packs, so results of the last step are read before the carry changes.
  collector.wait_for(caller_.record());
}

void Steps::gradient_ready(int parameter, StridedView gradient, GradientOwner owner,
                           const ValidAfter& valid) {
  if (ledger_.phase() == Phase::kClosed) check_usable("gradient_ready");
  outcome_.rethrow_failure("gradient_ready");
  outcome_.throw_drop();
  ledger_.require_collecting("gradient_ready");
  try {
    faults_.require_fits(parameter, gradient);
    const ValidAfter& after = valid.event || valid.stream ? valid : ValidAfter(caller_);
    if (!frozen_->collector().arrive(parameter, std::move(gradient), std::move(owner), after)) {
      throw UsageError(faults_.too_many(parameter, ledger_.in_window() ? &window_ : nullptr));
    }
  } catch (const UsageError& error) {
    note_fault(error.what());
    throw;
  }
}

void Steps::reject_gradient(std::string_view message) {
  if (ledger_.phase() == Phase::kCollecting) note_fault(std::string(message));
}

void Steps::note_fault(const std::string& message) {
  std::exception_ptr fault = std::make_exception_ptr(UsageError(message));
  outcome_.note_fault(fault);
}

std::string Steps::missing_message() const {
  return faults_.missing(frozen_->collector(), *plan_, ledger_.in_window());
}

double Steps::divide_factor() const {
  if (!ledger_.pending()) return result_->divide_factor.value_or(ledger_.divide_factor());
  if (ledger_.divisor().count_by() == CountBy::kNothing) return ledger_.divide_factor();
  return counted_divide_factor(result_->shard_count, ledger_.summed_microbatches());
}

bool Steps::has_gradient(int parameter) const {
  check_index("reducer: has_gradient", "a parameter index below", parameter, parameters_.size());
  const bool has_microbatch = ledger_.pending() || ledger_.phase() == Phase::kCollecting;
  return ledger_.begun() && has_microbatch && frozen_ && frozen_->collector().is_present(parameter);
}

void Steps::end_microbatch() {
  check_usable("end_microbatch");
  if (ledger_.in_window()) return ledger_.end_inside();
  ledger_.require_collecting("end_microbatch");
  end(1);
}

void Steps::check_window() {
  check_usable("end_window");
  ledger_.require_window_end();
  if (const std::exception_ptr fault = outcome_.fault()) std::rethrow_exception(fault);
  if (const std::string missing = missing_message(); !missing.empty()) throw UsageError(missing);
}

void Steps::end_window(std::int64_t backwards) {
  try {
    check_usable("end_window");
    ledger_.require_window_end();
    const bool are_handed_over = window_.accumulate == Accumulate::kGrad;
    if (backwards < 0 || (backwards > 1 && !are_handed_over)) {
      throw UsageError({.where = "reducer: end_window",
                        .expected = are_handed_over ? "a number of backward passes"
                                                    : "no number of backward passes, as they are "
                                                      "counted in a window that adds gradients up",
                        .got = std::to_string(backwards)});
    }
    end(std::max<std::int64_t>(backwards, 1));  // a rank without passes still takes part
  } catch (const std::exception& error) {
    leave_window(error.what());
    throw;
  }
}

void Steps::leave_window(std::string_view reason) noexcept {
  if (ledger_.in_window()) abandon(reason);
  ledger_.leave_dropped_window();
}

std::optional<StepAbortedError> Steps::take_drop() {
  check_failure("a new step");
  ledger_.require_idle("a new step");
  if (frozen_ && !ledger_.begun()) wait_until_judged();
  std::optional<Drop> drop = outcome_.take_drop();
  if (!drop) return std::nullopt;
  forget_step(drop->by);
  return StepAbortedError(drop->message, drop->ranks);
}

void Steps::end(std::int64_t backwards) {
  if (const std::string missing = missing_message(); !missing.empty()) note_fault(missing);
  if (plan_->is_local()) {
    close_local(backwards);
  } else {
    close_and_send(kMicrobatchCall, backwards);
  }
}

// Posts no word: the next word's microbatch number covers this microbatch.
void Steps::close_local(std::int64_t backwards) {
  Collector& collector = frozen_->collector();
  collector.fill_holes();
  raise_failure("end_microbatch");
  if (const std::exception_ptr fault = outcome_.settle_faults()) {
    drop(text_of(fault));
    std::rethrow_exception(fault);
  }
  count_backwards(backwards);
  collector.end();
  ledger_.end(*plan_);
}

// Each gradient is the sum of that many passes. If an f16 wire needs the counts, nothing has been
// packed yet.
void Steps::count_backwards(std::int64_t backwards) {
  if (!plan_->intake.counts_differ || !plan_->fresh) return;
  auto plan = std::make_shared<MicrobatchPlan>(*plan_);
  std::vector<std::int64_t> counts =
      frozen_->collector().backward_counts(parameters_.group_count());
  for (std::int64_t& count : counts) count *= backwards;
  plan->count_backwards(counts);
  if (ledger_.counts_passes() && !plan->intake.is_empty) {
    plan->count += *std::ranges::max_element(counts) - 1;
  }
  plan_ = std::move(plan);
  frozen_->collector().set_counts_of(plan_);
}

// If packs need what all ranks count, waits for all words: an f16 wire needs the exponents for the
// largest count, a hop that divides needs the counted f. Mismatches are found when the step ends.
std::optional<Words> Steps::raise_counts(std::int64_t word) {
  if (!plan_->packs_late) return std::nullopt;
  std::optional<Words> words;
  const Operation waiting(groups_.operations, {.kind = OperationKind::kWait});
  const Operation saying(groups_.operations, {.kind = OperationKind::kWord,
                                              .step = plan_->step,
                                              .microbatch = plan_->microbatch,
                                              .turn = word});
  try {
    words = agreement_.collect(word);
  } catch (...) {
    outcome_.fail(std::current_exception());
    raise_failure("end_microbatch");
  }
  auto plan = std::make_shared<MicrobatchPlan>(*plan_);
  std::int64_t count = result_->world_count;
  if (const auto sent = words->sent()) plan->raise_counts(sent->groups);
  for (const std::int64_t theirs : words->counts()) count += theirs;
  if (plan->count_by != CountBy::kNothing) {
    plan->set_counted_factor(counted_divide_factor(count, plan->summed_microbatches));
  }
  plan_ = std::move(plan);
  frozen_->collector().set_counts_of(plan_);
  return words;
}

void Steps::close_and_send(const char* call, std::int64_t backwards) {
  Collector& collector = frozen_->collector();
  wait_until_judged();
  if (const std::exception_ptr fault = outcome_.settle_faults()) {
    drop(text_of(fault));
    std::rethrow_exception(fault);
  }
  raise_drop();
  // The word goes out before the packs are done, so that peers in another sync mode learn of the
  // mismatch while this rank waits for them.
  count_backwards(backwards);
  const std::int64_t word = post(word_of(call, *plan_));
  const std::optional<Words> words = raise_counts(word);
  collector.fill_holes();
  collector.pack_until([&] { return collector.all_packed() || outcome_.failed(); });
  raise_failure("end_microbatch");
  collector.end();
  frozen_->pipeline().end({.word = word, .plan = plan_, .words = words});
  ledger_.end(*plan_);
  log_step(options_, groups_, *plan_);
}

StatusWord Steps::word_of(const char* call, const MicrobatchPlan& plan) const {
  StatusWord word;
  word.call = call;
  word.step = plan.step;
  word.microbatch = plan.microbatch;
  word.groups = plan.groups();
  if (plan.counts_differ) word.sums = "several, in " + std::string(hsdp::word_of(plan.sums_dtype));
  word.divide_factor = plan.divide_factor().value_or(0.0);
  word.loss_scale = plan.loss_scale();
  word.count_by = plan.count_by;
  word.count = plan.count;
  word.replica = groups_.replica();
  return word;
}

// A rank that cannot post its word drops the step.
std::int64_t Steps::post(StatusWord word) {
  try {
    word.sections = agreement_.sections();
  } catch (const std::exception& error) {
    drop(error.what());
    throw;
  }
  return agreement_.post(word);
}

void Steps::abandon(std::string_view reason) noexcept {
  if (ledger_.phase() == Phase::kClosed) return;
  try {
    raise_failure("abandon_step");
    if (ledger_.begun()) drop(std::string(reason));
  } catch (...) {  // the caller has an exception already; the next call repeats the failure
    if (!outcome_.failed()) outcome_.fail(std::current_exception());
  }
  if (ledger_.phase() == Phase::kCollecting) ledger_.drop();
}

// [Note: dropped step]
void Steps::drop(const std::string& reason) {
  Collector& collector = frozen_->collector();
  BucketPipeline& pipeline = frozen_->pipeline();
  // Late packs are not sent yet; their exponents depend on the words of all ranks.
  const bool sends = collector.is_open() && !plan_->is_local() && !plan_->packs_late;
  const std::vector<int> unsent = collector.drop();
  const std::exception_ptr fault = outcome_.settle_faults();  // after the last pack
  wait_until_judged();
  if (const std::optional<Drop> first = outcome_.take_drop()) return forget_step(first->by);
  const auto plan = sends ? plan_ : std::make_shared<const MicrobatchPlan>(ledger_.plan_of_step());
  const char* const call = !sends ? kDropCall : plan->fresh ? kMicrobatchCall : kFinishCall;
  StatusWord word = word_of(call, *plan);
  word.dropped = true;
  word.reason = fault ? text_of(fault) : reason;
  if (word.reason.empty()) word.reason = "no reason was given";
  const BucketPipeline::Ending ending{.word = agreement_.post(word), .plan = plan};
  if (sends) {  // peers wait for it
    Event packed;
    try {
      packed = collector.packed();
    } catch (const std::exception&) {  // this has ended the world
    }
    for (const int bucket : unsent) pipeline.launch_zeros(bucket, plan, packed);
    pipeline.end(ending);
  } else {
    pipeline.end_drop(ending);
  }
  forget_step(comm::ranks_text({groups_.world.rank()}, groups_.world.size()) + ": " + word.reason);
}

// Restores the state before the step, except the number of the next one.
void Steps::forget_step(const std::string& dropped_by) {
  Collector& collector = frozen_->collector();
  static_cast<void>(collector.drop());
  ledger_.drop();
  dropped_by_ = dropped_by;
  collector.clear_accumulators();
  zeros_sent_ = true;
}

// At most one word is under way: a rank that does not know yet that the step was dropped must not
// post a word about a later microbatch.
void Steps::wait_until_judged() {
  frozen_->collector().pack_until([this] { return !agreement_.under_way() || outcome_.failed(); });
  raise_failure("end of a microbatch");
}

void Steps::wait_for_words() {
  if (!frozen_) return;
  wait_until_judged();
  raise_drop();
}

void Steps::wait_reduced() {
  if (frozen_) {
    wait_for_words();
    frozen_->pipeline().wait_launched();
    caller_.wait(frozen_->pipeline().done());
  }
  check_usable("a result");
}

void Steps::finish() {
  check_usable("finish");
  ledger_.require_idle("finish");
  if (!ledger_.pending()) return wait_for_words();
  open(ledger_.begin_finish(), sums_dtype(std::nullopt));
  close_and_send(kFinishCall, 1);
  wait_reduced();
}

void Steps::discard() {
  if (ledger_.phase() == Phase::kClosed) check_usable("discard");
  raise_failure("discard");
  ledger_.require_idle("discard");
  if (!ledger_.begun()) {
    raise_drop();
    return ledger_.forget_result();
  }
  wait_until_judged();
  if (outcome_.take_drop()) return forget_step({});
  if (!ledger_.pending()) return;
  MicrobatchPlan plan = ledger_.plan_of_step();
  plan.result = result_;
  const std::int64_t word = post(word_of(kDiscardCall, plan));
  frozen_->pipeline().end({.word = word,
                           .plan = std::make_shared<const MicrobatchPlan>(std::move(plan)),
                           .discards_step = true});
  forget_step({});
}

}  // namespace hsdp::reducer
