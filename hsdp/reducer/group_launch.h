// What one microbatch (or finish) does with the buckets of one group: facts fixed when it begins,
// so that tasks on the streams never look at the Reducer's changing state.
#pragma once

#include <cstdint>

#include "hsdp/reducer.h"

namespace hsdp::reducer {

struct GroupLaunch {
  Sync sync = Sync::kNone;
  bool reduce = true;            // false: finish() with nothing local, only the replica hop
  bool fresh = true;             // gradients arrive; false: finish() sends the local sums
  bool accumulate = false;       // the carry already holds sums of this step
  std::int64_t local_count = 1;  // microbatches in one packed row
  std::int64_t carry_count = 1;  // microbatches in the carry after the reduce-scatter
  bool adds_total = false;       // an earlier `all` of this step left a replica-summed total
  bool final = false;            // the step ends: divide
  float divisor = 1.0F;

  // The exponent of an f16 wire: a local sum of n microbatches is sent times 2^-j.
  [[nodiscard]] int send_exponent(Dtype wire) const;
};

}  // namespace hsdp::reducer
