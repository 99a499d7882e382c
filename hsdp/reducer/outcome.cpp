#include "hsdp/reducer/outcome.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/comm/control.h"
#include "hsdp/comm/engine.h"
#include "hsdp/error.h"

namespace hsdp::reducer {
namespace {

// Why the world has ended, where that explains `error`: not where it ended because of this error,
// nor where the error says so itself, and for what this rank was waiting.
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
    const bool is_own = end.ranks() == std::vector<int>{control.rank()};
    return is_own ? error : std::current_exception();
  }
  return error;
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an error that is no std::exception";
  }
}

}  // namespace

void Outcome::fail(std::exception_ptr error) {
  comm::Control& control = world_.engine()->control();
  error = cause_of(error, control);
  std::string text = text_of(error);
  {
    const std::scoped_lock lock(mutex_);
    if (!failure_) failure_ = std::move(error);
  }
  control.fail({.kind = comm::FailureKind::kAborted,
                .message = "reducer: rank " + std::to_string(control.rank()) + " of " +
                           std::to_string(control.size()) + " failed: " + text,
                .ranks = {control.rank()}});
  on_change_();
}

bool Outcome::failed() const {
  const std::scoped_lock lock(mutex_);
  return failure_ != nullptr;
}

void Outcome::rethrow_failure() const {
  const std::scoped_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void Outcome::abort_step(std::exception_ptr error, std::int64_t through_epoch, std::int64_t step) {
  {
    const std::scoped_lock lock(mutex_);
    abort_ = Abort{std::move(error), step, through_epoch};
    skip_through_epoch_ = std::max(skip_through_epoch_, through_epoch);
  }
  on_change_();
}

std::optional<Outcome::Abort> Outcome::take_abort() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(abort_, std::nullopt);
}

void Outcome::rethrow_abort() const {
  const std::scoped_lock lock(mutex_);
  if (abort_) std::rethrow_exception(abort_->error);
}

bool Outcome::skips(std::int64_t epoch) const {
  const std::scoped_lock lock(mutex_);
  return failure_ != nullptr || epoch <= skip_through_epoch_;
}

}  // namespace hsdp::reducer
