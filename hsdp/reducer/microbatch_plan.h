// What one microbatch, or finish, does. Fixed when it begins and shared by its tasks, so that they
// never look at state that changes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/device/flag.h"
#include "hsdp/divide_factors.h"
#include "hsdp/reducer_options.h"

namespace hsdp::reducer {

// With the buckets of one group of parameters.
struct GroupPlan {
  Sync sync = Sync::kNone;
  std::int64_t local_count = 1;  // microbatches in one packed row; 0: finish() with nothing local
  std::int64_t carry_count = 1;  // microbatches in the carry after the shard hop
  bool has_carry = false;        // the carry already holds sums of this step
  bool has_total = false;        // an earlier `all` of this step left a replica-summed total

  [[nodiscard]] bool reduces() const { return local_count > 0; }
};

struct MicrobatchPlan {
  std::int64_t step = 0;
  std::int64_t microbatch = 0;  // in the step
  std::int64_t epoch = 0;       // counts every plan; later ones are greater
  bool begins_step = false;
  bool fresh = true;       // gradients arrive; false: finish() sends the local sums
  bool ends_step = false;  // every group is all: divide
  std::vector<GroupPlan> groups;
  std::optional<double> divide_factor;  // none: the default rule
  double loss_scale = 1.0;
  float divisor = 1.0F;
  int shard_size = 1;
  int replicate_size = 1;
  std::optional<Dtype> replica_dtype;  // none: the shard hop's
  Flag nonfinite;                      // of the step; tasks keep it alive

  [[nodiscard]] const GroupPlan& group(int number) const {
    return groups[static_cast<std::size_t>(number)];
  }
  [[nodiscard]] BucketArithmetic arithmetic(const Bucket& bucket) const;
  [[nodiscard]] bool has(Sync sync) const;
  // "shard all none": one word a group.
  [[nodiscard]] std::string sync_text() const;
};

}  // namespace hsdp::reducer
