#include "hsdp/reducer/row_steps.h"

#include <algorithm>
#include <utility>

#include "hsdp/comm/host/host_call.h"
#include "hsdp/error.h"
#include "hsdp/index_check.h"
#include "hsdp/reducer/same_calls.h"

namespace hsdp::reducer {
namespace {

WordNames row_names(const std::vector<std::string>& groups) {
  WordNames names;
  names.component = "replica_hook";
  names.microbatch = "backward";
  names.waiting = "end of a backward";
  names.remedy =
      "call set_requires_all_reduce with the same flags once before each backward, and finish() "
      "after the last, on every rank";
  names.groups = groups;
  return names;
}

}  // namespace

RowSteps::RowSteps(const Groups& ranks, std::vector<std::string> group_names, Outcome& outcome,
                   RowSums& sums, RowCheck& check, std::function<HopOwner*()> hop)
    : ranks_(ranks),
      outcome_(outcome),
      sums_(sums),
      check_(check),
      hop_(std::move(hop)),
      agreement_(ranks.world, Communicator(ranks.world).next_exchange_key(),
                 row_names(group_names)) {
  for (std::string& name : group_names) groups_.push_back({.name = std::move(name)});
}

std::size_t RowSteps::index(int group) const {
  return check_index("replica_hook", "a group below", group, std::ssize(groups_));
}

void RowSteps::set_requires_all_reduce(bool flag, std::span<const int> groups) {
  close_backward("set_requires_all_reduce");
  for (const int group : groups) groups_[index(group)].all_reduce = flag;
  ++call_count_;
}

void RowSteps::count_kept(int group) {
  ++groups_[index(group)].row_count;
  ++row_count_;
}

bool RowSteps::is_complete() const {
  return backward_ == Backward::kOver && std::ranges::all_of(groups_, [](const Group& group) {
           return group.all_reduce && group.row_count == 0;
         });
}

void RowSteps::close_complete_step(std::string_view call) {
  if (is_complete()) close_backward(call);
}

// Ends the backward: another one follows, or another step.
void RowSteps::close_backward(std::string_view call) {
  if (backward_ == Backward::kAgreed && !is_alone()) {
    outcome_.fail(std::make_exception_ptr(
        Error({.where = "replica_hook: " + std::string(call),
               .expected = "the end of a backward that reduces over the replicas",
               .got = "one that an error has left",
               .remedy = "save what you need and restart the job"})));
    outcome_.rethrow_failure(call);
  }
  if (backward_ == Backward::kNothingReduced) return;
  if (std::ranges::all_of(groups_, &Group::all_reduce)) {
    std::string kept;
    for (const Group& group : groups_) {
      if (group.row_count > 0) kept += (kept.empty() ? "" : ", ") + group.name;
    }
    if (!kept.empty()) {
      throw UsageError({.where = "replica_hook",
                        .expected = "no gradients left over from the last step",
                        .got = "those of " + kept + ", which did not run in its last backward",
                        .remedy = "call handle.finish() before optimizer.step()"});
    }
    next_step();
  }
  backward_ = Backward::kNothingReduced;
}

void RowSteps::begin_reduce() {
  if (backward_ == Backward::kOver) close_backward("reduce");
  ++row_count_;
}

void RowSteps::note_row(int group, int shard_size) {
  row_terms_ = comm::TermsHash()
                   .add(row_terms_)
                   .add(static_cast<std::uint64_t>(group))
                   .add(static_cast<std::uint64_t>(shard_size))
                   .value();
}

void RowSteps::agree() {
  if (backward_ == Backward::kAgreed) return;
  if (!is_alone()) judge(post(word_of(kBackwardCall)));
  backward_ = Backward::kAgreed;
}

std::int64_t RowSteps::carry_count(int group) const {
  return std::max(groups_[index(group)].most_rows, call_count_);
}

void RowSteps::reject(const std::string& message) {
  if (is_alone()) return;
  if (backward_ == Backward::kAgreed) {
    outcome_.fail(std::make_exception_ptr(UsageError(message)));
    return;
  }
  if (is_complete()) next_step();
  ++row_count_;  // it begins the step
  abandon(message);
}

bool RowSteps::end_last_backward() {
  if (backward_ != Backward::kAgreed) return false;
  backward_ = Backward::kOver;
  return !is_alone() && std::ranges::all_of(groups_, &Group::all_reduce);
}

void RowSteps::end_backward() {
  if (end_last_backward()) compare_calls(step_, "end of a backward");
}

void RowSteps::leave_backward() {
  if (end_last_backward() && !outcome_.failed()) post_calls();
}

void RowSteps::post_calls() {
  agreement_.post_calls(++look_count_, calls_of(ranks_, hop_()) + std::to_string(row_terms_));
}

void RowSteps::compare_calls(std::int64_t step, std::string_view act) {
  outcome_.guard(kNoStep, [&] {
    post_calls();
    const auto all = agreement_.collect_calls(look_count_);
    if (all) require_same_calls(ranks_, hop_(), agreement_, step, *all);
  });
  outcome_.rethrow_failure(act);
}

std::vector<int> RowSteps::begin_finish() {
  if (backward_ == Backward::kAgreed && !is_alone()) close_backward("finish");
  for (Group& group : groups_) group.most_rows = group.row_count;
  if (!is_alone()) judge(post(word_of(kFinishCall)));
  backward_ = Backward::kAgreed;
  std::vector<int> left;
  for (int g = 0; g < std::ssize(groups_); ++g) {
    if (groups_[index(g)].most_rows > 0) left.push_back(g);
  }
  return left;
}

void RowSteps::end_finish() {
  backward_ = Backward::kNothingReduced;
  if (!begun()) return;
  const std::int64_t step = step_;
  next_step();
  if (is_alone()) return;
  compare_calls(step, "finish");
  post_end(step);
  settle(step);
}

StatusWord RowSteps::word_of(const char* call) const {
  const bool finishes = call == kFinishCall;
  StatusWord word;
  word.call = call;
  word.step = step_;
  word.microbatch = call_count_;
  for (const Group& group : groups_) {
    word.groups.push_back({.sync = finishes || group.all_reduce ? Sync::kAll : Sync::kShard,
                           .carry_count = finishes ? group.row_count : group.row_count + 1});
  }
  return word;
}

// A rank that cannot post its word drops the step.
RowSteps::Posted RowSteps::post(StatusWord word) {
  judge_own_drop();
  word.step = step_;  // may have changed
  if (!word.dropped) {
    try {
      word.sections = agreement_.sections();
    } catch (const std::exception& error) {
      drop(error.what());
      throw;
    }
  }
  if (agreement_.ended_steps() < step_ && !own_drop_) {
    post_end(step_ - 1);
  }
  return {agreement_.post(word), step_};
}

Words RowSteps::collect(const Posted& posted) {
  const Operation operation(
      ranks_.operations,
      {.kind = OperationKind::kWord, .step = posted.step, .turn = posted.number});
  return agreement_.collect(posted.number);
}

// Throws if the ranks do not agree, or if one has dropped the step, which all then forget.
void RowSteps::judge(const Posted& posted) {
  const Words words = collect(posted);
  const bool last_is_cut = is_behind(words, posted.step);
  if (!last_is_cut) settle(posted.step - 1);
  StepAgreement::Judgement judgement = agreement_.judge(words);
  if (!judgement.mismatch && !judgement.dropped) {
    const StatusWord agreed = words.fields();
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      groups_[g].most_rows = agreed.groups[g].carry_count;
    }
    return;
  }
  if (last_is_cut) --step_;
  end_dropped(step_, judgement.mismatch ? judgement.mismatch->message : judgement.cause);
  next_step();
  if (judgement.mismatch) comm::throw_failure(*judgement.mismatch);
  throw_drop(std::move(*judgement.drop));
}

// The other ranks may spend long in backwards that send nothing. A rank that closes does not wait
// for them: they need no answer to its second drop.
void RowSteps::judge_own_drop() {
  if (!own_drop_ || is_closed_) return;
  const auto words = agreement_.collect_patiently(own_drop_->number);
  if (!words) return;
  if (is_behind(*words, own_drop_->step)) {
    --own_drop_->step;
    --step_;
  } else {
    settle(own_drop_->step - 1);
  }
  end_dropped(own_drop_->step, agreement_.judge(*words).cause);
  own_drop_.reset();
}

bool RowSteps::is_behind(const Words& words, std::int64_t step) const {
  return agreement_.ended_steps() < step && words.least_step() < step;
}

void RowSteps::post_end(std::int64_t step) {
  const bool is_nonfinite = sums_.take_nonfinite();
  agreement_.post_nonfinite(step, is_nonfinite, {}, check_.claim(step));
}

// The outcome of a step comes with the first word of the next one.
void RowSteps::settle(std::int64_t step) {
  if (agreement_.ended_steps() > step) return;
  const StepLooks looks{.at_most = [&](std::span<const std::int64_t> most) {
    check_.require_equal(step, most, agreement_);
  }};
  outcome_.guard(kNoStep, [&] { static_cast<void>(agreement_.settle(step, looks)); });
  outcome_.rethrow_failure("end of a step");
}

// The next step must not see what this one met.
void RowSteps::end_dropped(std::int64_t step, const std::string& cause) {
  static_cast<void>(sums_.take_nonfinite());
  outcome_.guard(kNoStep, [&] { agreement_.end_step({step, StepOutcome::kDropped, cause}); });
  outcome_.rethrow_failure("end of a step");
}

void RowSteps::abandon(std::string_view reason) noexcept {
  if (!begun()) return;
  try {
    outcome_.rethrow_failure("abandon_step");
    if (backward_ == Backward::kAgreed && !is_alone()) {
      throw Error("replica_hook: a backward that reduces over the replicas was left: " +
                  std::string(reason));
    }
    drop(reason);
  } catch (...) {
    fail(std::current_exception());
  }
}

void RowSteps::close(std::string_view reason) noexcept {
  is_closed_ = true;
  abandon(reason);
}

void RowSteps::drop(std::string_view reason) {
  if (is_alone()) return next_step();
  StatusWord word = word_of(kDropCall);
  word.groups.clear();
  word.dropped = true;
  word.reason = reason.empty() ? "no reason was given" : reason;
  own_drop_ = post(std::move(word));
  next_step();
}

void RowSteps::fail(std::exception_ptr error) {
  outcome_.fail(std::move(error));
  next_step();
}

void RowSteps::next_step() {
  for (Group& group : groups_) group.row_count = 0;
  ++step_;
  call_count_ = row_count_ = 0;
  backward_ = Backward::kNothingReduced;
}

}  // namespace hsdp::reducer
