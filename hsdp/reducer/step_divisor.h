// What a step's sum is divided by: f, which is set, counted, or follows from the hops that run, and
// the loss scale s. A StepLedger owns it and checks when each call may come.
#pragma once

#include <cstdint>
#include <optional>

#include "hsdp/reducer/microbatch_plan.h"

namespace hsdp::reducer {

class StepDivisor {
 public:
  StepDivisor(int shard_size, int replicate_size, DivideBy divide_by);

  // UsageErrors for values that are impossible, contradict each other within a step, or come too
  // late. `begun`: a step has begun; `pending`: it has microbatches.
  void set_factor(std::optional<double> factor, bool begun);
  void set_loss_scale(double scale, bool pending);
  // Adds to the next microbatch's count. `within_step`: the step already has microbatches.
  void add_tokens(std::int64_t count, bool within_step);
  // Fixes the factor until the step ends, as a hop divides by it.
  void fix() { stands_ = true; }

  // Forgets the last step's counts.
  void begin_step();
  // Counts a microbatch at its beginning.
  void count(std::optional<bool> has_batch, bool is_window);
  // Whether the step counts tokens, but the next microbatch has no count yet.
  [[nodiscard]] bool lacks_tokens() const { return count_by_ == CountBy::kTokens && !next_tokens_; }
  // Fills in the plan's fields about the step.
  void describe(MicrobatchPlan& plan) const;
  // Fills in the plan's divisor after `microbatches` microbatches.
  void set_divisor(MicrobatchPlan& plan, std::int64_t microbatches) const;
  // After the microbatch of that plan; the step then has `microbatches`. At the step's end, keeps
  // what its result was divided by.
  void end(const MicrobatchPlan& plan, std::int64_t microbatches);
  // Forgets what was fixed or counted for a dropped step.
  void drop();

  [[nodiscard]] CountBy count_by() const { return factor_ ? CountBy::kNothing : count_by_; }
  // Whether the step's factor is unknown before its last microbatch. `begun`: the step has begun.
  [[nodiscard]] bool is_late(std::optional<bool> has_batch, bool begun) const;
  // Of that many microbatches, the number whose sum a counted factor leaves undivided.
  [[nodiscard]] std::int64_t summed(std::int64_t microbatches) const;
  [[nodiscard]] bool averages_microbatches() const {
    return divide_by_ == DivideBy::kRanksMicrobatches;
  }
  // The f and s by which the last result was divided.
  [[nodiscard]] double result_factor() const { return result_factor_; }
  [[nodiscard]] double result_scale() const { return result_scale_; }
  // The f of a partial of that many microbatches, unless it is counted.
  [[nodiscard]] double partial_factor(std::int64_t microbatches) const;
  [[nodiscard]] double loss_scale() const { return loss_scale_; }

 private:
  // Of that many microbatches, the number over which the default factor averages.
  [[nodiscard]] std::int64_t averaged(std::int64_t microbatches) const;

  int shard_size_;
  int replicate_size_;
  DivideBy divide_by_;
  std::optional<double> factor_;
  CountBy count_by_ = CountBy::kNothing;  // of the step, or of the last one
  std::optional<std::int64_t> next_tokens_;
  std::int64_t unsaid_count_ = 0;  // since the last word
  bool stands_ = false;
  double loss_scale_ = 1.0;
  double result_factor_ = 1.0;
  double result_scale_ = 1.0;
};

}  // namespace hsdp::reducer
