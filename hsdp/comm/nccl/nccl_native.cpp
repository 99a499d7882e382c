#include "hsdp/comm/nccl/nccl_native.h"

#include "hsdp/comm/nccl/nccl_group.h"
#include "hsdp/comm/nccl/nccl_work.h"
#include "hsdp/kernels/scale_and_cast.h"
#include "hsdp/kernels/sum_rows.h"

namespace hsdp::comm {
namespace {

float* floats(std::byte* memory) { return reinterpret_cast<float*>(memory); }

void widen(ConstTensorView from, float* to, Stream& stream) {
  if (from.count == 0) return;
  kernels::scale_and_cast({.in = from.data, .in_dtype = from.dtype, .out = to, .count = from.count},
                          stream);
}

// Finishes the rank's row of the sum, with everything that one pass can do on the way.
void finish(const ReduceScatter& args, const void* sum, Stream& stream) {
  if (args.out.count == 0) return;
  void* const out = args.out.data;
  kernels::sum_rows({.spec = {.sum_exponent = args.sum_exponent,
                              .divisor = args.divisor,
                              .out_dtype = args.out.dtype},
                     .rows = {&sum, 1},
                     .add = args.accumulate ? out : nullptr,
                     .outs = {&out, 1},
                     .count = args.out.count,
                     .nonfinite = args.nonfinite},
                    stream);
}

}  // namespace

void native_reduce_scatter(NcclGroup& group, const ReduceScatter& args, Stream& stream) {
  if (args.in.count == 0) return;
  const RowCut& cut = *args.cut;
  const std::int64_t longest = cut.longest();
  const auto row_count = static_cast<std::size_t>(longest);
  const bool sent_as_it_is =
      args.in.dtype == Dtype::kF32 && args.in.count == longest * group.size();
  std::byte* const work =
      group.work(work_bytes(args, group.size()), group.in_is_registered(), stream);
  float* const sum = floats(work);
  float* const wide = floats(work + work_size(row_count * sizeof(float)));
  if (!sent_as_it_is) {  // also sums what lies between the rows; it is never read
    for (int r = 0; r < group.size(); ++r) {
      widen(args.in.slice(cut.begin(r), cut.length(r)), wide + r * longest, stream);
    }
  }
  group.send_group([&](NcclHandle on) {
    group.library().reduce_scatter(sent_as_it_is ? static_cast<const float*>(args.in.data) : wide,
                                   sum, row_count, on, stream.native_handle());
  });
  finish(args, sum, stream);
}

void native_all_reduce(NcclGroup& group, const AllReduce& args, Stream& stream) {
  const auto count = static_cast<std::size_t>(args.data.count);
  if (count == 0) return;
  const bool in_place = args.data.dtype == Dtype::kF32;
  const std::size_t bytes = work_bytes(args, group.size());
  std::byte* const work = group.work(bytes, group.memory().has_work(bytes, true), stream);
  float* const sum = in_place ? static_cast<float*>(args.data.data) : floats(work);
  if (!in_place) widen(args.data, sum, stream);
  group.send_group(
      [&](NcclHandle on) { group.library().all_reduce(sum, count, on, stream.native_handle()); });
  if (in_place && args.divisor == 1.0 && args.nonfinite == nullptr) return;
  kernels::scale_and_cast({.in = sum,
                           .out = args.data.data,
                           .out_dtype = args.data.dtype,
                           .count = args.data.count,
                           .divisor = args.divisor,
                           .nonfinite = args.nonfinite},
                          stream);
}

}  // namespace hsdp::comm
