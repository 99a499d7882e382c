#include "hsdp/reducer/outcome.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/engine.h"
#include "hsdp/error.h"

namespace hsdp::reducer {
namespace {

// Why the world has ended, if that explains `error`; null if the world ended because of this error,
// or the error says it itself.
std::exception_ptr cause_of(const std::exception_ptr& error, const comm::Control& control) {
  try {
    std::rethrow_exception(error);
  } catch (const RankError&) {
    return error;
  } catch (...) {  // looked at below
  }
  try {
    control.throw_if_failed();
  } catch (const RankError& end) {
    const bool is_own = std::string_view(end.what()).find(text_of(error)) != std::string_view::npos;
    return is_own ? error : std::current_exception();
  }
  return error;
}

}  // namespace

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an error that is no std::exception";
  }
}

void throw_drop(Drop drop) { throw StepAbortedError(drop.message, std::move(drop.ranks)); }

void Outcome::fail(std::exception_ptr error) {
  comm::Control& control = world_.engine()->control();
  error = cause_of(error, control);
  std::string text = text_of(error);
  {
    const std::scoped_lock lock(mutex_);
    if (!failure_) failure_ = std::move(error);
    has_failure_ = true;
  }
  control.fail({.kind = comm::FailureKind::kAborted,
                .message = title_ + ": " + comm::ranks_text({control.rank()}, control.size()) +
                           " failed: " + text,
                .ranks = {control.rank()}});
  on_change_();
}

void Outcome::rethrow_failure(std::string_view call) {
  if (!failed()) {
    if (!world_.engine()->control().failed()) return;
    std::exception_ptr end;
    try {
      world_.engine()->control().throw_if_failed_in(call);
    } catch (...) {
      end = std::current_exception();
    }
    fail(std::move(end));
  }
  const std::scoped_lock lock(mutex_);
  std::rethrow_exception(failure_);
}

void Outcome::open_faults() {
  const std::scoped_lock lock(mutex_);
  faults_open_ = true;
  fault_ = nullptr;
}

bool Outcome::note_fault(std::exception_ptr& error) {
  const std::scoped_lock lock(mutex_);
  if (!faults_open_) return false;
  if (!fault_) fault_ = std::move(error);
  return true;
}

std::exception_ptr Outcome::settle_faults() {
  const std::scoped_lock lock(mutex_);
  faults_open_ = fault_ != nullptr;
  return std::exchange(fault_, nullptr);
}

std::exception_ptr Outcome::fault() const {
  const std::scoped_lock lock(mutex_);
  return fault_;
}

void Outcome::drop_step(std::int64_t step, std::optional<Drop> drop) {
  {
    const std::scoped_lock lock(mutex_);
    last_drop_ = drop.value_or(Drop{title_ + ": step " + std::to_string(step) + " was dropped by " +
                                        comm::ranks_text({world_.rank()}, world_.size()) +
                                        ", this one; begin a new step on every rank",
                                    {world_.engine()->control().rank()}});
    drop_ = std::move(drop);
    has_drop_ = drop_.has_value();
    skip_through_step_ = std::max(skip_through_step_, step);
  }
  on_change_();
}

std::optional<Drop> Outcome::take_drop() {
  const std::scoped_lock lock(mutex_);
  has_drop_ = false;
  return std::exchange(drop_, std::nullopt);
}

void Outcome::throw_drop() const {
  if (!has_drop_) return;
  const std::scoped_lock lock(mutex_);
  if (drop_) reducer::throw_drop(*drop_);
}

void Outcome::guard(std::int64_t step, const std::function<void()>& task) {
  if (skips(step)) return;
  std::exception_ptr error;
  try {
    task();
  } catch (...) {
    error = std::current_exception();
  }
  // After the handler: this thread must not hold a reference to the exception any more.
  if (error) fail(std::move(error));
}

bool Outcome::skips(std::int64_t step) const {
  const std::scoped_lock lock(mutex_);
  return failure_ != nullptr || step <= skip_through_step_;
}

std::exception_ptr Outcome::refusal(std::int64_t step) const {
  const std::scoped_lock lock(mutex_);
  if (failure_) return failure_;
  if (step > skip_through_step_) return nullptr;
  return std::make_exception_ptr(StepAbortedError(last_drop_.message, last_drop_.ranks));
}

}  // namespace hsdp::reducer
