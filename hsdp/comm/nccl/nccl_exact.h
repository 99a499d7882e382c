// The collectives of a group of at least two ranks, made of NCCL's sends, receives and gathers and
// of our own kernels: the bits are those of every other engine.
//
// Each runs in a task of `stream`, after NcclGroup::agree(), and only enqueues. Rows may have any
// cut: uneven, empty.
#pragma once

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/nccl/nccl_group.h"

namespace hsdp::comm {

void exact_reduce_scatter(NcclGroup& group, const ReduceScatter& args, Stream& stream);
void exact_all_reduce(NcclGroup& group, const AllReduce& args, Stream& stream);

void gather_rows(NcclGroup& group, ConstTensorView in, TensorView out, const RowCut& cut,
                 Stream& stream);
void transpose_rows(NcclGroup& group, ConstTensorView in, TensorView out, const RowCut& cut,
                    Stream& stream);
void broadcast_bytes(NcclGroup& group, TensorView data, int root, Stream& stream);
void meet(NcclGroup& group, Stream& stream);

}  // namespace hsdp::comm
