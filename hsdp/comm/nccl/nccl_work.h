// What a reduction needs beside its arguments: where rows from the peers arrive, and what is sent
// in another dtype.
#pragma once

#include <cstddef>

#include "hsdp/comm/communicator.h"

namespace hsdp::comm {

// Rows, and parts of work memory, begin on such.
constexpr std::size_t kWorkAlignment = 256;
constexpr std::size_t work_size(std::size_t bytes) {
  return (bytes + kWorkAlignment - 1) / kWorkAlignment * kWorkAlignment;
}

// Rows at unequal distances that a kernel takes.
constexpr int kMostListedRows = 400;

[[nodiscard]] bool sums_natively(Reduction reduction, Dtype dtype);

// The sum that this rank makes of an all-reduce, and what its peers do.
[[nodiscard]] RowCut sum_cut(std::int64_t count, int size);

// Of the rank of a group of `size` that needs most: the same on all of them.
[[nodiscard]] std::size_t work_bytes(const ReduceScatter& args, int size);
[[nodiscard]] std::size_t work_bytes(const AllReduce& args, int size);
// Whether it sends from there too, so that any kind of memory will do.
[[nodiscard]] bool sends_from_work(const AllReduce& args);
// Of an all-to-all whose memory is registered on one side only.
[[nodiscard]] std::size_t work_bytes(ConstTensorView in, const RowCut& cut);

}  // namespace hsdp::comm
