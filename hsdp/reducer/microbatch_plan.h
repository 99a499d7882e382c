// What one microbatch, or finish, does. Fixed when it begins and shared by its tasks, so that they
// never look at state that changes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/device/flag.h"
#include "hsdp/divide_factors.h"
#include "hsdp/reducer_options.h"

namespace hsdp::reducer {

// How a step came out, shared by the tasks that find out and the caller who asks.
struct StepResult {
  Flag nonfinite;  // what this rank met
  std::atomic<bool> found_inf{false};
  // kAgreed: every rank ends the step here, the result stands in stream order. kKnown: every rank's
  // device has computed it, and found_inf is the whole world's. On the host these are one. That
  // this rank's device is done says less: a hop that a peer aborted looks to it like any other.
  enum class Progress : std::uint8_t { kRunning, kAgreed, kKnown };
  std::atomic<Progress> progress{Progress::kRunning};
  // What all ranks, and those of this shard group, have counted so far, where that divides, and
  // what the result was divided by. Of agreed words: to be read when none is under way.
  std::int64_t world_count = 0;
  std::int64_t shard_count = 0;
  std::optional<double> divide_factor;
  std::string present;  // with missing = zero, by parameter, '1' where any rank had a gradient
};

// What is counted into the divide factor.
enum class CountBy : std::uint8_t { kNothing, kBatches, kTokens };

// With the buckets of one group of parameters.
struct GroupPlan {
  Sync sync = Sync::kNone;
  // Backward passes, of the rank that has most: in one packed row, 0 in a finish() with nothing
  // local; and in the carry after the shard hop.
  std::int64_t local_count = 1;
  std::int64_t carry_count = 1;
  bool has_carry = false;  // the carry already holds sums of this step
  bool has_total = false;  // an earlier `all` of this step left a replica-summed total

  [[nodiscard]] bool reduces() const { return local_count > 0; }
};

// How the gradients of a microbatch come.
struct Intake {
  static constexpr std::int64_t kAnyNumber = 0;
  std::int64_t most = 1;       // gradients that a parameter may get, or kAnyNumber
  bool adds = false;           // to the local sum, which is packed when it is complete
  bool counts_differ = false;  // between ranks: how many backward passes there are
  bool is_empty = false;       // this rank has no batch
};

struct MicrobatchPlan {
  int shard_size = 1;
  int replicate_size = 1;
  std::optional<Dtype> replica_dtype;  // none: the shard hop's
  std::int64_t step = 0;
  std::int64_t microbatch = 0;  // in the step
  bool begins_step = false;
  bool fresh = true;  // gradients arrive; false: finish() sends the local sums
  Intake intake;
  // The intake's counts, or those of pending local sums, differ between ranks.
  bool counts_differ = false;
  // And an f16 wire needs the most of any rank: nothing is packed before all words are in.
  bool packs_late = false;
  AccumulateDtype sums_dtype = AccumulateDtype::kF32;  // of the local sums
  std::shared_ptr<StepResult> result;                  // of the step
  std::vector<char> means;  // by bucket, whether its hop divides; empty: none does
  CountBy count_by = CountBy::kNothing;
  std::int64_t count = 0;                // this rank's since its last word
  std::int64_t summed_microbatches = 1;  // of the step so far, where counts are of their mean

  // f, none: the default rule, for the mean of so many microbatches; and s. What is counted is
  // known later.
  void set_divisor(std::optional<double> factor, double scale, std::int64_t microbatches = 1);
  // f that was counted over all ranks: hops divide by it. Otherwise what ends the step does.
  void set_counted_factor(double factor);
  [[nodiscard]] bool divides_late() const {
    return count_by != CountBy::kNothing && ends_step() && !counted_factor_;
  }
  [[nodiscard]] const std::optional<double>& divide_factor() const { return divide_factor_; }
  [[nodiscard]] double loss_scale() const { return loss_scale_; }
  [[nodiscard]] double divisor() const { return divisor_; }  // of a whole step: f s

  void set_groups(std::vector<GroupPlan> groups);
  // That this microbatch has so many backward passes instead of one, by group.
  void count_backwards(const std::vector<std::int64_t>& counts);
  // That another rank counted more.
  void raise_counts(const std::vector<GroupPlan>& theirs);
  [[nodiscard]] const std::vector<GroupPlan>& groups() const { return groups_; }
  [[nodiscard]] const GroupPlan& group(int number) const {
    return groups_[static_cast<std::size_t>(number)];
  }
  [[nodiscard]] bool has(Sync sync) const;
  // Every group is all: divides.
  [[nodiscard]] bool ends_step() const { return ends_step_; }
  // Every group is none: sends nothing.
  [[nodiscard]] bool is_local() const;

  [[nodiscard]] BucketArithmetic arithmetic(const BucketLayout& layout, int number) const;

 private:
  std::optional<double> divide_factor_;
  std::optional<double> counted_factor_;
  double loss_scale_ = 1.0;
  double divisor_ = 1.0;
  std::vector<GroupPlan> groups_;  // none: what discards or drops a step
  bool ends_step_ = false;
};

}  // namespace hsdp::reducer
