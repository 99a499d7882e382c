#include "hsdp/reducer/outcome.h"

#include <algorithm>
#include <utility>

namespace hsdp::reducer {

void Outcome::fail(std::exception_ptr error) {
  {
    const std::scoped_lock lock(mutex_);
    if (!failure_) failure_ = std::move(error);
  }
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

bool Outcome::aborted() const {
  const std::scoped_lock lock(mutex_);
  return abort_.has_value();
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
