#include "hsdp/replica_hop.h"

#include <utility>

#include "hsdp/error.h"

namespace hsdp {

HopOwner::HopOwner(std::shared_ptr<ReplicaHop> hop, HopPlan plan)
    : hop_(std::move(hop)), plan_(std::move(plan)) {
  if (!hop_->owned_.test_and_set()) return;
  throw UsageError(hop_->owner() +
                   ": expected one Reducer or replica_hook to use it, got a second; make another");
}

HopOwner::~HopOwner() {
  hop_->bind({}, {});
  hop_->owned_.clear();
}

void PlainHop::bind(Communicator scatter, Communicator /*gather*/) {
  replicas_ = std::move(scatter);
}

Event PlainHop::reduce(const HopBucket& bucket, Stream& stream) {
  AllReduce args;
  args.data = bucket.data;
  args.wire = bucket.arithmetic.wire;
  args.send_exponent = bucket.arithmetic.send_exponent;
  args.total_exponent = bucket.arithmetic.total_exponent;
  args.divisor = bucket.arithmetic.divisor;
  args.nonfinite = bucket.nonfinite;
  args.bucket = bucket.bucket;
  args.reduction = reduction_;
  replicas_.all_reduce(args, stream);
  return {};  // in a task of the stream: done, or in its order
}

}  // namespace hsdp
