// What a group of one does with memory on a GPU: nothing travels, nothing is rounded.
#pragma once

#include "hsdp/comm/communicator.h"

namespace hsdp::comm {

// In a task of `stream`.
void sum_alone(const ReduceScatter& args, Stream& stream);
void sum_alone(const AllReduce& args, Stream& stream);
void copy_alone(ConstTensorView in, TensorView out, Stream& stream);

}  // namespace hsdp::comm
