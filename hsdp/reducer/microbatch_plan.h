// What one microbatch, or finish, does. Fixed when it begins and shared by its tasks, which
// therefore never read state that changes.
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

// The outcome of a step, shared by the tasks that find it out and the caller.
struct StepResult {
  Flag nonfinite;  // whether this rank met a non-finite value
  std::atomic<bool> found_inf{false};
  // kAgreed: every rank ends the step here, and the result is valid in stream order. kKnown: every
  // rank's device has computed it, and found_inf is the whole world's. The same on the host. It is
  // not enough that this rank's device is done: a hop that a peer aborted looks complete to it.
  enum class Progress : std::uint8_t { kRunning, kAgreed, kKnown };
  std::atomic<Progress> progress{Progress::kRunning};
  // The counts of all ranks and of this shard group so far, if they are the divisor, and what the
  // result was divided by. Taken from agreed words: read them when no word is under way.
  std::int64_t world_count = 0;
  std::int64_t shard_count = 0;
  std::optional<double> divide_factor;
  std::string present;  // with missing = zero: by parameter, '1' if any rank had a gradient
};

// What is counted into the divide factor.
enum class CountBy : std::uint8_t { kNothing, kBatches, kTokens };

// What a microbatch does with the buckets of one group of parameters.
struct GroupPlan {
  Sync sync = Sync::kNone;
  // Backward passes of the rank that has most: in one packed row (0 in a finish() without local
  // sums), and in the carry after the shard hop.
  std::int64_t local_count = 1;
  std::int64_t carry_count = 1;
  bool has_carry = false;  // the carry already holds sums of this step
  bool has_total = false;  // an earlier `all` of this step left a replica-summed total

  [[nodiscard]] bool reduces() const { return local_count > 0; }
};

// How the gradients of a microbatch arrive.
struct Intake {
  static constexpr std::int64_t kAnyNumber = 0;
  std::int64_t most = 1;       // gradients per parameter, or kAnyNumber
  bool adds = false;           // gradients go into the local sum, which is packed when complete
  bool counts_differ = false;  // ranks may have different numbers of backward passes
  bool is_empty = false;       // this rank has no batch
};

struct MicrobatchPlan {
  int shard_size = 1;
  int replicate_size = 1;
  std::optional<Dtype> replica_dtype;  // none: as on the shard hop
  std::int64_t step = 0;
  std::int64_t microbatch = 0;  // in the step
  bool begins_step = false;
  bool fresh = true;  // gradients arrive; false: finish() sends the local sums
  Intake intake;
  // Ranks may have different counts, in this intake or in pending local sums.
  bool counts_differ = false;
  // Nothing is packed before all words are in: an f16 wire needs the largest count of any rank, and
  // a hop that divides needs the counted f.
  bool packs_late = false;
  AccumulateDtype sums_dtype = AccumulateDtype::kF32;  // of the local sums
  std::shared_ptr<StepResult> result;                  // of the step
  std::vector<char> means;  // by bucket, whether its hop divides; empty: none does
  CountBy count_by = CountBy::kNothing;
  std::int64_t count = 0;                // of this rank since its last word
  std::int64_t summed_microbatches = 1;  // of the step so far, by which a counted factor is divided

  // Sets f and s. Without a factor f follows from the default rule, for the mean of that many
  // microbatches. A counted f is known later.
  void set_divisor(std::optional<double> factor, double scale, std::int64_t microbatches = 1);
  // Sets an f counted over all ranks, by which hops divide. Without it the end of the step divides.
  void set_counted_factor(double factor);
  [[nodiscard]] bool divides_late() const {
    return count_by != CountBy::kNothing && ends_step() && !counted_factor_;
  }
  [[nodiscard]] const std::optional<double>& divide_factor() const { return divide_factor_; }
  [[nodiscard]] double loss_scale() const { return loss_scale_; }
  [[nodiscard]] double divisor() const { return divisor_; }  // of a whole step: f s

  void set_groups(std::vector<GroupPlan> groups);
  // Sets the number of this microbatch's backward passes, by group.
  void count_backwards(const std::vector<std::int64_t>& counts);
  // Raises them to another rank's, where that counted more.
  void raise_counts(const std::vector<GroupPlan>& theirs);
  [[nodiscard]] const std::vector<GroupPlan>& groups() const { return groups_; }
  [[nodiscard]] const GroupPlan& group(int number) const {
    return groups_[static_cast<std::size_t>(number)];
  }
  [[nodiscard]] bool has(Sync sync) const;
  // Every group has sync = all: the result is divided.
  [[nodiscard]] bool ends_step() const { return ends_step_; }
  // Every group has sync = none: nothing is sent.
  [[nodiscard]] bool is_local() const;

  [[nodiscard]] BucketArithmetic arithmetic(const BucketLayout& layout, int number) const;

 private:
  std::optional<double> divide_factor_;
  std::optional<double> counted_factor_;
  double loss_scale_ = 1.0;
  double divisor_ = 1.0;
  std::vector<GroupPlan> groups_;  // empty: a discard or a drop
  bool ends_step_ = false;
};

}  // namespace hsdp::reducer
