// Which sync each group of parameters runs in a microbatch. A pure function of the call's arguments
// and the groups' flags, so that tests can walk through the whole precedence table.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "hsdp/reducer.h"

namespace hsdp::reducer {

// As FSDP2's set_requires_gradient_sync and set_requires_all_reduce leave them.
struct SyncFlags {
  bool gradient_sync = true;
  bool all_reduce = true;
};

struct SyncPlan {
  std::vector<Sync> groups;
  bool ends_step = false;  // every group is all, or the caller said so
};

// UsageError when `last` is true and a group's gradient sync is off.
[[nodiscard]] SyncPlan plan_sync(const MicrobatchOptions& options,
                                 std::span<const SyncFlags> flags);

// "shard all none": one word a group, for status words and messages.
[[nodiscard]] std::string describe(const SyncPlan& plan);

}  // namespace hsdp::reducer
