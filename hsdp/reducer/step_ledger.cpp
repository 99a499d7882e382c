#include "hsdp/reducer/step_ledger.h"

#include <algorithm>
#include <string>
#include <utility>

#include "hsdp/error.h"

namespace hsdp::reducer {

StepLedger::StepLedger(int shard_size, int replicate_size, std::optional<Dtype> replica_dtype,
                       DivideBy divide_by)
    : replica_dtype_(replica_dtype), divisor_(shard_size, replicate_size, divide_by) {}

void StepLedger::require_idle(std::string_view call) const {
  if (window_ == Window::kDropped) {
    throw UsageError({.where = "reducer: " + std::string(call),
                      .expected = "a call outside of the window whose step was dropped",
                      .got = "one inside of it",
                      .remedy = "leave its block first"});
  }
  if (phase_ == Phase::kIdle) return;
  if (window_ == Window::kOpen) {
    throw UsageError({.where = "reducer: " + std::string(call),
                      .expected = "a call outside of a window of several backward passes",
                      .got = "one inside of it",
                      .remedy = "end the window first"});
  }
  throw UsageError({.where = "reducer: " + std::string(call),
                    .expected = "no open microbatch",
                    .got = "one",
                    .remedy = "call end_microbatch first"});
}

void StepLedger::require_collecting(std::string_view call) const {
  if (phase_ == Phase::kCollecting) return;
  throw UsageError({.where = "reducer: " + std::string(call),
                    .expected = "an open microbatch",
                    .got = "none",
                    .remedy = "call begin_microbatch first"});
}

void StepLedger::set_group_count(int count) {
  const auto size = static_cast<std::size_t>(std::max(1, count));
  flags_.resize(size);
  groups_.resize(size);
}

template <typename Apply>
void StepLedger::each_flags(std::optional<int> group, Apply apply) {
  if (window_ != Window::kOpen) {
    require_idle("set_requires_gradient_sync and set_requires_all_reduce");
  }
  flags_were_set_ = true;
  if (group) return apply(flags_[static_cast<std::size_t>(*group)]);
  std::ranges::for_each(flags_, apply);
}

void StepLedger::set_requires_gradient_sync(bool flag, std::optional<int> group) {
  each_flags(group, [flag](Flags& flags) { flags.gradient_sync = flags.all_reduce = flag; });
}

void StepLedger::set_requires_all_reduce(bool flag, std::optional<int> group) {
  each_flags(group, [flag](Flags& flags) { flags.all_reduce = flag; });
}

void StepLedger::set_gradient_divide_factor(std::optional<double> factor) {
  require_idle("set_gradient_divide_factor");
  divisor_.set_factor(factor, begun_);
}

void StepLedger::set_loss_scale(double scale) {
  require_idle("set_loss_scale");
  divisor_.set_loss_scale(scale, pending());
}

void StepLedger::divide_by_tokens(std::int64_t count) {
  require_idle("divide_by_tokens");
  divisor_.add_tokens(count, begun_ && microbatch_ > 0);
}

void StepLedger::set_partial_sync(Sync sync) {
  require_idle("set_partial_sync");
  if (sync == Sync::kAll) {
    throw UsageError({.where = "reducer: set_partial_sync",
                      .expected = "sync=\"shard\" or \"none\"",
                      .got = "\"all\", which ends a step",
                      .remedy = "end a step with last=True"});
  }
  partial_sync_ = sync;
}

Sync StepLedger::sync_of(const MicrobatchOptions& options, const Flags& flags) const {
  if (options.sync) return *options.sync;
  if (!flags.gradient_sync) return Sync::kNone;
  if (options.last) return *options.last ? Sync::kAll : partial_sync_;
  return flags.all_reduce ? Sync::kAll : Sync::kShard;
}

std::vector<Sync> StepLedger::sync_of(const MicrobatchOptions& options) const {
  const bool last = options.last.value_or(false);
  if (last && options.sync && *options.sync != Sync::kAll) {
    throw UsageError({.where = "reducer: begin_microbatch",
                      .expected = "sync=\"all\" with last=True",
                      .got = "another sync",
                      .remedy = "leave one of the two out"});
  }
  if (last && !options.sync) require_gradient_sync("begin_microbatch");
  std::vector<Sync> sync;
  sync.reserve(flags_.size());
  for (const Flags& flags : flags_) sync.push_back(sync_of(options, flags));
  return sync;
}

void StepLedger::require_gradient_sync(std::string_view call) const {
  if (std::ranges::all_of(flags_, &Flags::gradient_sync)) return;
  throw UsageError({.where = "reducer: " + std::string(call),
                    .expected = "gradient sync on in the last microbatch",
                    .got = "gradient sync off",
                    .remedy = "call set_requires_gradient_sync(True) first"});
}

std::vector<Sync> StepLedger::sync_of(const WindowOptions& options) const {
  if (options.last.value_or(false)) require_gradient_sync("begin_window");
  return sync_of(MicrobatchOptions{.last = options.last});
}

void StepLedger::require_meant(const MicrobatchOptions& options) const {
  if (begun_ && divisor_.lacks_tokens() && options.has_batch.value_or(true)) {
    throw UsageError({.where = "reducer: begin_microbatch",
                      .expected = "divide_by_tokens before each microbatch of the step",
                      .got = "none before this one",
                      .remedy = "call it with 0 where there are none"});
  }
  const bool says_nothing = !options.last && !options.sync && !flags_were_set_;
  const bool loses = begun_ ? lost_unread_ && microbatch_ == 0 && !pending()
                            : holds_ == Holds::kResult && !is_read_;
  if (!says_nothing || !loses) return;
  throw UsageError({.where = "reducer: begin_microbatch",
                    .expected = "the step's result to be read",
                    .got = "another microbatch, which begins a new step and loses it",
                    .remedy = "pass last=False to every microbatch of a step but the last one and "
                              "last=True to that, or drop the result with discard()"});
}

void StepLedger::forget_result() {
  if (holds_ == Holds::kResult) holds_ = Holds::kNothing;
}

void StepLedger::start_step() {
  lost_unread_ = holds_ == Holds::kResult && !is_read_;
  holds_ = Holds::kNothing;
  is_read_ = false;
  divisor_.begin_step();
  std::ranges::fill(groups_, Group{});
  begun_ = true;
  dropped_ = false;
  ++step_;
  microbatch_ = 0;
}

void StepLedger::begin_step() {
  require_idle("step");
  if (pending()) {
    throw UsageError({.where = "reducer: step",
                      .expected = "no step under way",
                      .got = "one with microbatches pending",
                      .remedy = "end it with last=True, finish() or discard() first"});
  }
  if (!begun_) start_step();
}

MicrobatchPlan StepLedger::begin(const std::vector<Sync>& sync, const Intake& intake,
                                 std::optional<bool> has_batch) {
  return begin_any(sync, intake, has_batch, false);
}

MicrobatchPlan StepLedger::begin_any(const std::vector<Sync>& sync, Intake intake,
                                     std::optional<bool> has_batch, bool is_window) {
  require_idle("begin_microbatch");
  if (!begun_) start_step();
  divisor_.count(has_batch, is_window);
  intake.is_empty = !has_batch.value_or(true);
  MicrobatchPlan plan = open(sync, true, intake);
  plan.begins_step = !pending();
  return plan;
}

MicrobatchPlan StepLedger::begin_window(const std::vector<Sync>& sync, const Intake& intake,
                                        std::optional<bool> has_batch) {
  MicrobatchPlan plan = begin_any(sync, intake, has_batch, true);
  flags_before_window_ = flags_;
  window_ = Window::kOpen;
  return plan;
}

void StepLedger::begin_inside() {
  if (window_ == Window::kMicrobatchOpen) require_idle("begin_microbatch");
  window_ = Window::kMicrobatchOpen;
}

void StepLedger::end_inside() {
  if (window_ == Window::kMicrobatchOpen) {
    window_ = Window::kOpen;
    return;
  }
  throw UsageError({.where = "reducer: end_microbatch",
                    .expected = "a microbatch open in the window",
                    .got = "none",
                    .remedy = "call begin_microbatch first, or end the window"});
}

void StepLedger::require_window_end() const {
  if (window_ == Window::kOpen) return;
  if (window_ == Window::kMicrobatchOpen) {
    throw UsageError({.where = "reducer: end_window",
                      .expected = "every microbatch inside of the window ended",
                      .got = "an open one",
                      .remedy = "call end_microbatch first"});
  }
  const bool is_dropped = window_ == Window::kDropped;
  throw UsageError({.where = "reducer: end_window",
                    .expected = "an open window",
                    .got = is_dropped ? "one whose step was dropped inside of it" : "none",
                    .remedy = "begin a new one"});
}

void StepLedger::leave_window(Window left) {
  if (!in_window()) return;
  window_ = left;
  flags_ = flags_before_window_;
}

void StepLedger::leave_dropped_window() {
  if (window_ == Window::kDropped) window_ = Window::kNone;
}

bool StepLedger::has_local_sums() const {
  return std::ranges::any_of(groups_, [](const Group& group) { return group.local_count > 0; });
}

MicrobatchPlan StepLedger::begin_finish() {
  require_idle("finish");
  return open(std::vector<Sync>(groups_.size(), Sync::kAll), false, {});
}

MicrobatchPlan StepLedger::open(const std::vector<Sync>& sync, bool fresh, const Intake& intake) {
  phase_ = Phase::kCollecting;
  MicrobatchPlan plan = plan_of_step();
  plan.fresh = fresh;
  plan.intake = intake;
  plan.counts_differ = intake.counts_differ || std::ranges::any_of(groups_, &Group::counts_differ);
  divisor_.set_divisor(plan, microbatch_ + (fresh ? 1 : 0));
  std::vector<GroupPlan> groups;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const std::int64_t local_count = group.local_count + (fresh ? 1 : 0);
    groups.push_back({.sync = sync[g],
                      .local_count = local_count,
                      .carry_count = group.carry_count + local_count,
                      .has_carry = group.carry_count > 0,
                      .has_total = group.has_total});
  }
  plan.set_groups(std::move(groups));
  return plan;
}

MicrobatchPlan StepLedger::plan_of_step() const {
  MicrobatchPlan plan;
  plan.step = step_;
  plan.microbatch = microbatch_;
  plan.replica_dtype = replica_dtype_;
  divisor_.describe(plan);
  return plan;
}

void StepLedger::end(const MicrobatchPlan& plan) {
  phase_ = Phase::kIdle;
  leave_window(Window::kNone);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const GroupPlan& did = plan.groups()[g];
    Group& group = groups_[g];
    if (did.sync == Sync::kNone) {
      group.local_count = did.local_count;
      group.counts_differ = group.counts_differ || plan.intake.counts_differ;
      continue;
    }
    const bool totalled = did.sync == Sync::kAll && !plan.ends_step();
    group.local_count = 0;
    group.counts_differ = false;
    group.carry_count = totalled ? 0 : did.carry_count;
    group.has_total = group.has_total || totalled;
  }
  if (plan.fresh) {
    ++microbatch_;
    ++microbatch_total_;
  }
  holds_ = plan.ends_step() ? Holds::kResult : Holds::kPending;
  if (plan.ends_step()) {
    begun_ = false;
    ++step_total_;
  }
  divisor_.end(plan, microbatch_);
}

void StepLedger::drop() {
  phase_ = Phase::kIdle;
  leave_window(Window::kDropped);
  dropped_ = step_ >= 0;
  if (holds_ == Holds::kResult) --step_total_;
  holds_ = Holds::kNothing;
  std::ranges::fill(groups_, Group{});
  begun_ = false;
  divisor_.drop();
}

}  // namespace hsdp::reducer
