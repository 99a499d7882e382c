#include "hsdp/comm/host/host_piped.h"

#include <cstring>

#include "hsdp/comm/host/multicast_copy.h"
#include "hsdp/comm/host/piped_copy.h"
#include "hsdp/comm/host/piped_reduce.h"

namespace hsdp::comm {
namespace {

void copy_own(void* to, const void* from, std::size_t size) {
  if (to != from && size > 0) std::memcpy(to, from, size);
}

}  // namespace

void piped_reduce_scatter(HostGroup& group, const ReduceScatter& args) {
  group.open_channels();
  PipedReduce(group, args).run();
}

void piped_all_reduce(HostGroup& group, const AllReduce& args) {
  group.open_channels();
  PipedReduce(group, args).run();
}

void piped_all_gather(HostGroup& group, ConstTensorView in, TensorView out, const RowCut& cut) {
  group.open_channels();
  copy_own(out.slice(cut.begin(group.rank()), in.count).data, in.data, in.size_in_bytes());
  MulticastCopy to_all(group);
  PipedCopy one_by_one(group);
  to_all.send(in.data, in.size_in_bytes());
  for (int r = 0; r < group.size(); ++r) {
    if (r == group.rank()) continue;
    const TensorView row = out.slice(cut.begin(r), cut.length(r));
    to_all.receive(r, row.data, row.size_in_bytes());
    one_by_one.send(r, in.data, in.size_in_bytes());
    one_by_one.receive(r, row.data, row.size_in_bytes());
  }
  group.multicast() != nullptr ? to_all.run() : one_by_one.run();
}

void piped_all_to_all(HostGroup& group, ConstTensorView in, TensorView out, const RowCut& cut) {
  group.open_channels();
  PipedCopy copies(group);
  const std::int64_t own = cut.length(group.rank());
  for (int r = 0; r < group.size(); ++r) {
    const ConstTensorView sent = in.slice(cut.begin(r), cut.length(r));
    const TensorView received = out.slice(r * own, own);
    if (r == group.rank()) {
      copy_own(received.data, sent.data, sent.size_in_bytes());
    } else {
      copies.send(r, sent.data, sent.size_in_bytes());
      copies.receive(r, received.data, received.size_in_bytes());
    }
  }
  copies.run();
}

void piped_broadcast(HostGroup& group, TensorView data, int root) {
  group.open_channels();
  MulticastCopy to_all(group);
  PipedCopy one_by_one(group);
  if (group.rank() != root) {
    to_all.receive(root, data.data, data.size_in_bytes());
    one_by_one.receive(root, data.data, data.size_in_bytes());
  } else {
    to_all.send(data.data, data.size_in_bytes());
    for (int r = 0; r < group.size(); ++r) {
      if (r != root) one_by_one.send(r, data.data, data.size_in_bytes());
    }
  }
  group.multicast() != nullptr ? to_all.run() : one_by_one.run();
}

}  // namespace hsdp::comm
