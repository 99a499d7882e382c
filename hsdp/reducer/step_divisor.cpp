#include "hsdp/reducer/step_divisor.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>

#include "hsdp/divide_factors.h"
#include "hsdp/error.h"

namespace hsdp::reducer {
namespace {

std::string short_text(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

void check_divisor(const std::optional<double>& factor, double scale) {
  if (is_usable_divisor(factor.value_or(1.0), scale)) return;
  throw UsageError(
      {.where = "reducer: divide factor times loss scale",
       .expected = "a product that fp32 and its reciprocal hold",
       .got = (factor ? short_text(*factor) : "the default") + " times " + short_text(scale),
       .remedy = "choose another factor or scale"});
}

}  // namespace

StepDivisor::StepDivisor(int shard_size, int replicate_size, DivideBy divide_by)
    : shard_size_(shard_size), replicate_size_(replicate_size), divide_by_(divide_by) {}

void StepDivisor::set_factor(std::optional<double> factor, bool begun) {
  if (factor && (!std::isfinite(*factor) || *factor == 0)) {
    throw UsageError({.where = "reducer: set_gradient_divide_factor",
                      .expected = "a finite factor other than 0",
                      .got = short_text(*factor)});
  }
  if (factor && (next_tokens_ || (begun && count_by_ == CountBy::kTokens))) {
    throw UsageError({.where = "reducer: set_gradient_divide_factor",
                      .expected = "a step without divide_by_tokens",
                      .got = "one with it",
                      .remedy = "use one of the two in a step"});
  }
  if (stands_ && factor != factor_) {
    throw UsageError({.where = "reducer: set_gradient_divide_factor",
                      .expected = "a call before the step's first replica hop, which divides by it",
                      .got = "one after",
                      .remedy = "call it earlier, or between steps"});
  }
  check_divisor(factor, loss_scale_);
  factor_ = factor;
}

void StepDivisor::set_loss_scale(double scale, bool pending) {
  if (!std::isfinite(scale) || scale <= 0) {
    throw UsageError({.where = "reducer: set_loss_scale",
                      .expected = "a finite scale above 0",
                      .got = short_text(scale)});
  }
  if (pending) {
    throw UsageError({.where = "reducer: set_loss_scale",
                      .expected = "a call between steps",
                      .got = "one while microbatches are pending",
                      .remedy = "call it after the step, finish() or discard()"});
  }
  check_divisor(factor_, scale);
  loss_scale_ = scale;
}

void StepDivisor::add_tokens(std::int64_t count, bool within_step) {
  constexpr std::string_view kWhere = "reducer: divide_by_tokens";
  constexpr std::int64_t kMost = std::int64_t{1} << 53;  // up to which fp64 is exact
  if (count < 0 || count > kMost) {
    throw UsageError({.where = std::string(kWhere),
                      .expected = "a number of tokens from 0 to 2^53",
                      .got = std::to_string(count)});
  }
  if (factor_) {
    throw UsageError({.where = std::string(kWhere),
                      .expected = "the default divide factor",
                      .got = "one of set_gradient_divide_factor",
                      .remedy = "call set_gradient_divide_factor(None) first, or leave this out"});
  }
  if (stands_) {
    throw UsageError({.where = std::string(kWhere),
                      .expected = "a call before the step's first replica hop, which divides",
                      .got = "one after",
                      .remedy = "reduce all groups in the step's last microbatch"});
  }
  if (within_step && count_by_ != CountBy::kTokens) {
    throw UsageError(
        {.where = std::string(kWhere),
         .expected = "a call before each microbatch of the step",
         .got = "none before the first",
         .remedy = "call it before every begin_microbatch, with 0 where there are none"});
  }
  next_tokens_ = next_tokens_.value_or(0) + count;
}

void StepDivisor::begin_step() {
  count_by_ = CountBy::kNothing;
  unsaid_count_ = 0;
}

void StepDivisor::count(std::optional<bool> has_batch, bool is_window) {
  const bool by_passes = is_window && divide_by_ == DivideBy::kRanksMicrobatches;
  std::int64_t count = has_batch.value_or(true) ? 1 : 0;
  if (next_tokens_ || count_by_ == CountBy::kTokens) {
    count_by_ = CountBy::kTokens;
    count = std::exchange(next_tokens_, std::nullopt).value_or(0);
  } else if (has_batch || by_passes) {
    count_by_ = CountBy::kBatches;
  }
  unsaid_count_ += count;
}

bool StepDivisor::is_late(std::optional<bool> has_batch, bool begun) const {
  if (factor_) return false;
  return divide_by_ == DivideBy::kRanksMicrobatches || next_tokens_ || has_batch ||
         (begun && count_by_ != CountBy::kNothing);
}

std::int64_t StepDivisor::averaged(std::int64_t microbatches) const {
  return divide_by_ == DivideBy::kRanksMicrobatches ? std::max<std::int64_t>(microbatches, 1) : 1;
}

std::int64_t StepDivisor::summed(std::int64_t microbatches) const {
  const bool sums = divide_by_ == DivideBy::kRanks && count_by_ == CountBy::kBatches;
  return sums ? std::max<std::int64_t>(microbatches, 1) : 1;
}

void StepDivisor::describe(MicrobatchPlan& plan) const {
  plan.shard_size = shard_size_;
  plan.replicate_size = replicate_size_;
  plan.set_divisor(factor_, loss_scale_);
  plan.count_by = count_by();
  plan.count = unsaid_count_;
}

void StepDivisor::set_divisor(MicrobatchPlan& plan, std::int64_t microbatches) const {
  plan.set_divisor(factor_, loss_scale_, averaged(microbatches));
  plan.summed_microbatches = summed(microbatches);
}

void StepDivisor::end(const MicrobatchPlan& plan, std::int64_t microbatches) {
  unsaid_count_ = plan.is_local() ? plan.count : 0;
  if (!plan.ends_step()) return;
  stands_ = false;
  result_factor_ = gradient_divide_factor(shard_size_, replicate_size_, true, plan.divide_factor(),
                                          averaged(microbatches));
  result_scale_ = plan.loss_scale();
}

void StepDivisor::drop() {
  stands_ = false;
  next_tokens_.reset();
}

double StepDivisor::partial_factor(std::int64_t microbatches) const {
  return gradient_divide_factor(shard_size_, replicate_size_, false, factor_,
                                averaged(microbatches));
}

}  // namespace hsdp::reducer
