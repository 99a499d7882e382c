#include "hsdp/reducer/sync_plan.h"

#include <algorithm>

#include "hsdp/error.h"

namespace hsdp::reducer {
namespace {

Sync group_sync(const MicrobatchOptions& options, const SyncFlags& flags) {
  if (options.sync) return *options.sync;
  if (!flags.gradient_sync) return Sync::kNone;
  if (options.last) return *options.last ? Sync::kAll : Sync::kShard;
  return flags.all_reduce ? Sync::kAll : Sync::kShard;
}

}  // namespace

SyncPlan plan_sync(const MicrobatchOptions& options, std::span<const SyncFlags> flags) {
  const bool last = options.last.value_or(false);
  if (last && options.sync && *options.sync != Sync::kAll) {
    throw UsageError(
        "reducer: begin_microbatch: expected sync = all with last = true, got another sync; "
        "leave one of the two out");
  }
  if (last && !options.sync &&
      std::ranges::any_of(flags, [](const SyncFlags& f) { return !f.gradient_sync; })) {
    throw UsageError(
        "reducer: begin_microbatch: expected gradient sync on in the last microbatch, got it off; "
        "call set_requires_gradient_sync(true) first");
  }
  SyncPlan plan;
  plan.groups.reserve(flags.size());
  for (const SyncFlags& group : flags) plan.groups.push_back(group_sync(options, group));
  plan.ends_step = std::ranges::all_of(plan.groups, [](Sync s) { return s == Sync::kAll; });
  return plan;
}

std::string describe(const SyncPlan& plan) {
  std::string text;
  for (const Sync sync : plan.groups) {
    text += text.empty() ? "" : " ";
    text += sync == Sync::kNone ? "none" : sync == Sync::kShard ? "shard" : "all";
  }
  return text;
}

}  // namespace hsdp::reducer
