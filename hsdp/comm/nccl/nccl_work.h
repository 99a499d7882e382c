// The work memory of a reduction: where rows from peers arrive, and what is sent in another dtype.
#pragma once

#include <cstddef>

#include "hsdp/comm/communicator.h"

namespace hsdp::comm {

// Alignment of rows and of parts of work memory.
constexpr std::size_t kWorkAlignment = 256;
constexpr std::size_t work_size(std::size_t bytes) {
  return (bytes + kWorkAlignment - 1) / kWorkAlignment * kWorkAlignment;
}

// How many rows at unequal distances a kernel takes.
constexpr int kMostListedRows = 400;

[[nodiscard]] bool sums_natively(Reduction reduction, Dtype dtype);

// How an all-reduce is divided into the sums of the ranks.
[[nodiscard]] RowCut sum_cut(std::int64_t count, int size);

// For the rank that needs most in a group of `size`: the same on all of them.
[[nodiscard]] std::size_t work_bytes(const ReduceScatter& args, int size);
[[nodiscard]] std::size_t work_bytes(const AllReduce& args, int size);
// Whether it also sends from work memory, so that either kind will do.
[[nodiscard]] bool sends_from_work(const AllReduce& args);
// For an all-to-all whose memory is registered on one side only.
[[nodiscard]] std::size_t work_bytes(ConstTensorView in, const RowCut& cut);

}  // namespace hsdp::comm
