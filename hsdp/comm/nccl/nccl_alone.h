// What a group of one does with GPU memory: it sends and rounds nothing.
#pragma once

#include "hsdp/comm/communicator.h"

namespace hsdp::comm {

// In a task of `stream`.
void sum_alone(const ReduceScatter& args, Stream& stream);
void sum_alone(const AllReduce& args, Stream& stream);
void copy_alone(ConstTensorView in, TensorView out, Stream& stream);

}  // namespace hsdp::comm
