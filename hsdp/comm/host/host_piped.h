// Collectives on private memory: rows are cut into messages that go through the group's channels.
//
// The progress loop runs on the calling thread: it sends while a peer has space, sums a tile as
// soon as every peer's has arrived, and waits only when nothing moves. With a 16-bit wire, an
// all-reduce rounds rows as it sends them. The bits equal those of the direct path.
#pragma once

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/host/host_group.h"

namespace hsdp::comm {

// Call each after group.agree(). Returns when the collective is complete on this rank.
void piped_reduce_scatter(HostGroup& group, const ReduceScatter& args);
void piped_all_reduce(HostGroup& group, const AllReduce& args);
void piped_all_gather(HostGroup& group, ConstTensorView in, TensorView out, const RowCut& cut);
void piped_all_to_all(HostGroup& group, ConstTensorView in, TensorView out, const RowCut& cut);
void piped_broadcast(HostGroup& group, TensorView data, int root);

}  // namespace hsdp::comm
