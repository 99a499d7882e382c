#include "hsdp/replica_hop.h"

#include <algorithm>
#include <utility>

#include "hsdp/kernels/scale_and_cast.h"

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

PlainScatter::PlainScatter(const HopPlan& plan, std::span<const std::optional<Dtype>> wires)
    : cuts_(plan.cuts), reduction_(plan.reduction), memory_(plan.memory) {
  for (std::size_t b = 0; b < wires.size(); ++b) {
    if (!wires[b]) continue;
    ReduceScatter& call = to_come_.emplace_back();
    call.in = plan.data[b].front();
    call.cut = cuts_[b];
    call.reduction = reduction_;
    if (*wires[b] == call.in.dtype) continue;
    call.in.dtype = *wires[b];
    call.in.data = nullptr;  // until there is memory
    const auto bytes = static_cast<std::int64_t>(call.in.size_in_bytes());
    staging_bytes_ = std::max(staging_bytes_, bytes);
  }
}

HopNeed PlainScatter::need() const {
  HopNeed need{.state_bytes = staging_bytes_};
  for (const ReduceScatter& call : to_come_) {
    need.wire_bytes += message_bytes(call.in.count, call.in.dtype, reduction_);
  }
  return need;
}

void PlainScatter::bind(Communicator& replicas) {
  if (staging_bytes_ > 0) {
    staging_ = replicas.allocate(staging_bytes_, Dtype::kU8);
    held_ = memory_.hold(MemoryKind::kReplicaHop, staging_bytes_);
  }
  for (ReduceScatter& call : to_come_) {
    if (call.in.data == nullptr) call.in.data = staging_.view().data;
  }
  if (!to_come_.empty()) replicas.reserve(to_come_);
  to_come_.clear();
}

ConstTensorView PlainScatter::sent(const HopBucket& bucket) const {
  ConstTensorView sent = bucket.data;
  if (bucket.arithmetic.wire == sent.dtype) return sent;
  sent.data = staging_.view().data;
  sent.dtype = bucket.arithmetic.wire;
  return sent;
}

void PlainScatter::round(const HopBucket& bucket, const Stream& stream) const {
  if (bucket.arithmetic.wire == bucket.data.dtype) return;
  kernels::ScaleAndCast args;
  args.in = bucket.data.data;
  args.in_dtype = bucket.data.dtype;
  args.out = staging_.view().data;
  args.out_dtype = bucket.arithmetic.wire;
  args.count = bucket.data.count;
  args.exponent = -bucket.arithmetic.send_exponent;
  kernels::scale_and_cast(args, stream);
}

ReduceScatter PlainScatter::call(const HopBucket& bucket) const {
  ReduceScatter args;
  args.in = sent(bucket);
  args.out = bucket.part;
  args.cut = cut(bucket.bucket);
  args.sum_exponent = bucket.arithmetic.send_exponent;
  args.divisor = bucket.arithmetic.divisor;
  args.nonfinite = bucket.nonfinite;
  args.bucket = bucket.bucket;
  args.planned = bucket.planned;
  args.reduction = reduction_;
  return args;
}

std::vector<std::optional<Dtype>> PlainHop::wires(const HopPlan& plan) const {
  std::vector<std::optional<Dtype>> wires;
  for (const Dtype wire : plan.wires) wires.emplace_back(replica_wire(wire, wire_));
  return wires;
}

HopNeed PlainHop::need(const HopPlan& plan) const {
  const std::vector<std::optional<Dtype>> sent = wires(plan);
  if (!plan.cuts.empty()) return PlainScatter(plan, sent).need();
  HopNeed need;
  for (std::size_t b = 0; b < sent.size(); ++b) {
    need.wire_bytes += 2 * message_bytes(plan.data[b].front().count, *sent[b], plan.reduction);
  }
  return need;
}

void PlainHop::prepare(const HopPlan& plan) {
  reduction_ = plan.reduction;
  to_come_.clear();
  scatter_.reset();
  const std::vector<std::optional<Dtype>> sent = wires(plan);
  if (!plan.cuts.empty()) {
    scatter_.emplace(plan, sent);
    return;
  }
  for (std::size_t b = 0; b < sent.size(); ++b) {
    for (const TensorView& data : plan.data[b]) {
      AllReduce& call = to_come_.emplace_back();
      call.data = data;
      call.wire = sent[b];
      call.reduction = reduction_;
    }
  }
}

void PlainHop::bind(Communicator scatter, Communicator /*gather*/) {
  replicas_ = std::move(scatter);
  if (!replicas_) {
    scatter_.reset();
  } else if (scatter_) {
    scatter_->bind(replicas_);
  } else {
    replicas_.reserve(to_come_);
  }
  to_come_.clear();
}

Event PlainHop::reduce(const HopBucket& bucket, Stream& stream) {
  if (scatter_) {
    scatter_->round(bucket, stream);
    replicas_.reduce_scatter(scatter_->call(bucket), stream);
  } else {
    replicas_.all_reduce(plain_sum(bucket, reduction_), stream);
  }
  return {};  // in a task of the stream: done, or in its order
}

}  // namespace hsdp
