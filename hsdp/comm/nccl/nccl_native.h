// Reductions by NCCL's own sums, in fp32 [Note: native sums]: every replica gets the same bits, but
// the other numeric rules do not hold.
//
// f32, bf16 and f16 only. They run in tasks of a stream, as in nccl_exact.h.
#pragma once

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/nccl/nccl_group.h"

namespace hsdp::comm {

// Rows of unequal length travel as rows of the longest length.
void native_reduce_scatter(NcclGroup& group, const ReduceScatter& args, Stream& stream);
void native_all_reduce(NcclGroup& group, const AllReduce& args, Stream& stream);

}  // namespace hsdp::comm
