#include "hsdp/replica_hop.h"

#include <utility>

namespace hsdp {

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
