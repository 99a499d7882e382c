#include "hsdp/comm/nccl/nccl_work.h"

#include <utility>
#include <vector>

#include "hsdp/comm/host/reduce_plan.h"

namespace hsdp::comm {
namespace {

// For every peer's row and, if there are too many rows to list, this rank's own.
std::size_t row_bytes(std::int64_t count, Dtype dtype, int size) {
  const int rows = size > kMostListedRows ? size : size - 1;
  return work_size(static_cast<std::size_t>(count) * size_bytes(dtype)) *
         static_cast<std::size_t>(rows);
}

}  // namespace

bool sums_natively(Reduction reduction, Dtype dtype) {
  return reduction == Reduction::kNative && sums_in_f32(dtype);
}

RowCut sum_cut(std::int64_t count, int size) {
  std::vector<std::int64_t> offsets{0};
  for (int r = 0; r < size; ++r) {
    offsets.push_back(offsets.back() + all_reduce_slice(count, size, r).length);
  }
  return RowCut(std::move(offsets));
}

std::size_t work_bytes(const ReduceScatter& args, int size) {
  const std::int64_t longest = args.cut->longest();
  if (!sums_natively(args.reduction, args.in.dtype)) {
    return row_bytes(longest, args.in.dtype, size);
  }
  const auto row = static_cast<std::size_t>(longest) * sizeof(float);
  const bool sent_as_it_is = args.in.dtype == Dtype::kF32 && args.in.count == longest * size;
  return work_size(row) + (sent_as_it_is ? 0 : row * static_cast<std::size_t>(size));
}

std::size_t work_bytes(const AllReduce& args, int size) {
  const std::int64_t count = args.data.count;
  if (sums_natively(args.reduction, args.data.dtype)) {
    return args.data.dtype == Dtype::kF32 ? 0 : static_cast<std::size_t>(count) * sizeof(float);
  }
  const Dtype wire = wire_dtype(args);
  const std::size_t rows = row_bytes(sum_cut(count, size).longest(), wire, size);
  if (!rounds_on_wire(args)) return rows;
  return rows + work_size(static_cast<std::size_t>(count) * size_bytes(wire));
}

bool sends_from_work(const AllReduce& args) {
  return sums_natively(args.reduction, args.data.dtype) || rounds_on_wire(args);
}

std::size_t work_bytes(ConstTensorView in, const RowCut& cut) {
  const auto rows = static_cast<std::size_t>(cut.longest() * cut.size());
  return rows * size_bytes(in.dtype);
}

}  // namespace hsdp::comm
