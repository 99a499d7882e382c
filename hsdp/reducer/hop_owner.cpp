#include "hsdp/reducer/hop_owner.h"

#include <utility>

#include "hsdp/error.h"
#include "hsdp/reducer/together.h"

namespace hsdp::reducer {

HopOwner::HopOwner(Groups& groups, std::shared_ptr<ReplicaHop> hop, const MakePlan& make_plan)
    : hop_(std::move(hop)), scatter_(groups.replicate) {
  together(groups.world, "prepare its replica hop", [&] {
    if (hop_->owned_.test_and_set()) {
      throw UsageError({.where = hop_->owner(),
                        .expected = "one Reducer or replica_hook to use it",
                        .got = "a second",
                        .remedy = "make another"});
    }
    taken_.reset(hop_.get());
    plan_ = make_plan();
    hop_->prepare(plan_);
    has_gather_group_ = hop_->needs_gather_group();
  });
  if (has_gather_group_) {
    together(groups.world, "make a group of its replica hop",
             [&] { gather_ = groups.replicate.split(0, groups.replicate.rank()); });
  }
  together(groups.world, "bind its replica hop", [&] { hop_->bind(scatter_, gather_); });
}

std::int64_t HopOwner::wire_bytes() const {
  std::int64_t bytes = 0;
  const auto add = [&bytes](const Communicator& group) {
    const CollectiveCounts counts = group.stats();
    for (const auto& kind : counts.kinds) bytes += kind.bytes;
    bytes += counts[CollectiveKind::kAllReduce].bytes;
  };
  add(scatter_);
  if (has_gather_group_) add(gather_);
  return bytes;
}

std::string HopOwner::calls() const {
  return calls_text(scatter_) + (has_gather_group_ ? calls_text(gather_) : "");
}

void HopOwner::compare_calls(const std::string& key) {
  scatter_.compare_calls(key);
  if (has_gather_group_) gather_.compare_calls(key);
}

std::int64_t HopOwner::reserved_bytes() const {
  return scatter_.reserved_bytes() + (has_gather_group_ ? gather_.reserved_bytes() : 0);
}

void HopOwner::prepare(HopPlan plan) {
  plan_ = std::move(plan);
  hop_->prepare(plan_);
}

void HopOwner::Release::operator()(ReplicaHop* hop) const {
  hop->bind({}, {});
  hop->owned_.clear();
}

}  // namespace hsdp::reducer
