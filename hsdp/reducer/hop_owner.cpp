#include "hsdp/reducer/hop_owner.h"

#include <utility>

#include "hsdp/error.h"
#include "hsdp/reducer/together.h"

namespace hsdp::reducer {

HopOwner::HopOwner(Groups& groups, std::shared_ptr<ReplicaHop> hop, const MakePlan& make_plan)
    : hop_(std::move(hop)) {
  bool needs_gather_group = false;
  together(groups.world, "prepare its replica hop", [&] {
    if (hop_->owned_.test_and_set()) {
      throw UsageError(
          hop_->owner() +
          ": expected one Reducer or replica_hook to use it, got a second; make another");
    }
    taken_.reset(hop_.get());
    plan_ = make_plan();
    hop_->prepare(plan_);
    needs_gather_group = hop_->needs_gather_group();
  });
  Communicator gather;
  if (needs_gather_group) {
    together(groups.world, "make a group of its replica hop",
             [&] { gather = groups.replicate.split(0, groups.replicate.rank()); });
  }
  together(groups.world, "bind its replica hop", [&] { hop_->bind(groups.replicate, gather); });
}

void HopOwner::prepare(Groups& groups, const MakePlan& make_plan) {
  together(groups.world, "prepare its replica hop", [&] {
    plan_ = make_plan();
    hop_->prepare(plan_);
  });
}

void HopOwner::Release::operator()(ReplicaHop* hop) const {
  hop->bind({}, {});
  hop->owned_.clear();
}

}  // namespace hsdp::reducer
