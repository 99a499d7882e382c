// Reductions by NCCL's own sums, in fp32 [Note: native sums]: every replica has the same bits, and
// nothing else of the numeric rules holds.
//
// f32, bf16 and f16 only. In tasks of a stream, as nccl_exact.h.
#pragma once

#include "hsdp/comm/communicator.h"
#include "hsdp/comm/nccl/nccl_group.h"

namespace hsdp::comm {

// Rows of unequal length travel as rows of the longest one.
void native_reduce_scatter(NcclGroup& group, const ReduceScatter& args, Stream& stream);
void native_all_reduce(NcclGroup& group, const AllReduce& args, Stream& stream);

}  // namespace hsdp::comm
