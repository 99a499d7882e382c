#include "hsdp/replica_hop.h"

namespace hsdp {

void PlainHop::reduce(Communicator& replicas, const ReplicaShard& shard, Stream& stream) {
  AllReduce args;
  args.data = shard.data;
  args.wire = shard.arithmetic.wire;
  args.send_exponent = shard.arithmetic.send_exponent;
  args.total_exponent = shard.arithmetic.total_exponent;
  args.divisor = shard.arithmetic.divisor;
  args.nonfinite = shard.nonfinite;
  args.bucket = shard.bucket;
  args.reduction = shard.reduction;
  replicas.all_reduce(args, stream);
}

}  // namespace hsdp
