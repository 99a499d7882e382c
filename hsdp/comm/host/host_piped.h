// Collectives on private memory: rows are cut into messages that pass through the group's channels.
//
// The progress loop runs on the calling thread: it sends while a peer has room, sums a tile as soon
// as every peer's has come, and waits only when nothing moves. Rows of an all-reduce with a 16-bit
// wire are rounded as they are sent. The bits equal those of the direct path.
#pragma once

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/host/host_group.h"

namespace hsdp::comm {

// Each follows group.agree() and returns when the collective is complete on this rank.
void piped_reduce_scatter(HostGroup& group, const ReduceScatter& args);
void piped_all_reduce(HostGroup& group, const AllReduce& args);
void piped_all_gather(HostGroup& group, ConstTensorView in, TensorView out, const RowCut& cut);
void piped_all_to_all(HostGroup& group, ConstTensorView in, TensorView out, const RowCut& cut);
void piped_broadcast(HostGroup& group, TensorView data, int root);

}  // namespace hsdp::comm
