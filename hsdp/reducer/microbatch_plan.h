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
  // kAgreed: every rank ends the step here, the result stands in stream order. kComputed: and the
  // device has it. kKnown: and found_inf is the whole world's. On the host these are one.
  enum class Progress : std::uint8_t { kRunning, kAgreed, kComputed, kKnown };
  std::atomic<Progress> progress{Progress::kRunning};
};

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

  // f, none: the default rule; and s.
  void set_divisor(std::optional<double> factor, double scale);
  [[nodiscard]] const std::optional<double>& divide_factor() const { return divide_factor_; }
  [[nodiscard]] double loss_scale() const { return loss_scale_; }
  [[nodiscard]] float divisor() const { return divisor_; }  // of a whole step: fp32(f s)

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
  double loss_scale_ = 1.0;
  float divisor_ = 1.0F;
  std::vector<GroupPlan> groups_;  // none: what discards or drops a step
  bool ends_step_ = false;
};

}  // namespace hsdp::reducer
