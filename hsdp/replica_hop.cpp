#include "hsdp/replica_hop.h"

#include <utility>

namespace hsdp {

AllReduce plain_sum(const HopBucket& bucket, Reduction reduction) {
  AllReduce args;
  args.data = bucket.data;
  args.wire = bucket.arithmetic.wire;
  args.send_exponent = bucket.arithmetic.send_exponent;
  args.total_exponent = bucket.arithmetic.total_exponent;
  args.divisor = bucket.arithmetic.divisor;
  args.nonfinite = bucket.nonfinite;
  args.bucket = bucket.bucket;
  args.planned = bucket.planned;
  args.reduction = reduction;
  return args;
}

void PlainHop::prepare(const HopPlan& plan) {
  reduction_ = plan.reduction;
  to_come_.clear();
  for (std::size_t b = 0; b < plan.ranges.size(); ++b) {
    for (const TensorView& data : plan.data[b]) {
      AllReduce& call = to_come_.emplace_back();
      call.data = data;
      call.wire = replica_wire(plan.wires[b], wire_);
      call.reduction = reduction_;
    }
  }
}

void PlainHop::bind(Communicator scatter, Communicator /*gather*/) {
  replicas_ = std::move(scatter);
  if (replicas_) replicas_.reserve(to_come_);
  to_come_.clear();
}

Event PlainHop::reduce(const HopBucket& bucket, Stream& stream) {
  replicas_.all_reduce(plain_sum(bucket, reduction_), stream);
  return {};  // in a task of the stream: done, or in its order
}

}  // namespace hsdp
