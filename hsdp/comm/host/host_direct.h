// Collectives on memory that all ranks of the group map: one pass over the peers' rows in place
// [Note: reduce where it lies].
#pragma once

#include <span>

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/host/host_call.h"
#include "hsdp/comm/host/host_group.h"

namespace hsdp::comm {

// Call each after group.agree(), which returns `calls`. Returns when the collective is complete on
// this rank.
void direct_reduce_scatter(HostGroup& group, std::span<const HostCall> calls,
                           const ReduceScatter& args);
void direct_all_reduce(HostGroup& group, std::span<const HostCall> calls, const AllReduce& args);
void direct_all_gather(HostGroup& group, std::span<const HostCall> calls, ConstTensorView in,
                       TensorView out, const RowCut& cut);
void direct_all_to_all(HostGroup& group, std::span<const HostCall> calls, ConstTensorView in,
                       TensorView out, const RowCut& cut);
void direct_broadcast(HostGroup& group, std::span<const HostCall> calls, TensorView data, int root);

}  // namespace hsdp::comm
