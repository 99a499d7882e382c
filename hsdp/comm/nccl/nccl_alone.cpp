#include "hsdp/comm/nccl/nccl_alone.h"

#include "hsdp/device/copy.h"
#include "hsdp/kernels/sum_rows.h"

namespace hsdp::comm {

void sum_alone(const ReduceScatter& args, Stream& stream) {
  if (args.in.count == 0) return;
  const void* const row = args.in.data;
  void* const out = args.out.data;
  kernels::sum_rows({.spec = {.row_dtype = args.in.dtype,
                              .wire_dtype = args.in.dtype,
                              .sum_exponent = args.sum_exponent,
                              .divisor = args.divisor,
                              .out_dtype = args.out.dtype},
                     .rows = {&row, 1},
                     .add = args.accumulate ? out : nullptr,
                     .outs = {&out, 1},
                     .count = args.in.count,
                     .nonfinite = args.nonfinite},
                    stream);
}

void sum_alone(const AllReduce& args, Stream& stream) {
  sum_alone(
      {.in = args.data, .out = args.data, .divisor = args.divisor, .nonfinite = args.nonfinite},
      stream);
}

void copy_alone(ConstTensorView in, TensorView out, Stream& stream) {
  if (in.count > 0 && in.data != out.data) {
    copy_bytes(out.data, in.data, in.size_in_bytes(), stream);
  }
}

}  // namespace hsdp::comm
