#include "hsdp/replica_hop.h"

#include "hsdp/divide_factors.h"

namespace hsdp {
namespace {

class PlainHop final : public ReplicaHop {
 public:
  void reduce(Communicator& replicas, const ReplicaShard& shard, Stream& stream) override {
    AllReduce args;
    args.data = shard.data;
    args.wire = shard.wire;
    if (shard.wire == Dtype::kF16) {  // [Note: f16 headroom]: sums travel scaled, undone exactly
      const std::int64_t summed = shard.shard_size * shard.microbatch_count;
      args.send_exponent = headroom_exponent(summed);
      args.total_exponent = headroom_exponent(summed * replicas.size());
    }
    args.divisor = shard.divisor;
    args.nonfinite = shard.nonfinite;
    args.bucket = shard.bucket;
    args.reduction = shard.reduction;
    replicas.all_reduce(args, stream);
  }
  [[nodiscard]] bool has_state() const override { return false; }
  [[nodiscard]] std::string_view name() const override { return "plain"; }
};

}  // namespace

std::shared_ptr<ReplicaHop> plain_hop() { return std::make_shared<PlainHop>(); }

}  // namespace hsdp
