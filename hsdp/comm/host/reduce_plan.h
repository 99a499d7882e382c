// The arithmetic of the reductions, shared by every path, so that all give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hsdp/comm/communicator.h"
#include "hsdp/kernels/sum_rows.h"

namespace hsdp::comm {

// Larger results are written around the cache.
constexpr std::size_t kStreamingBytes = std::size_t{4} << 20;

struct ElementRun {
  std::int64_t begin = 0;
  std::int64_t length = 0;
};
// The elements of an all-reduce that one rank sums: whole blocks of 32, as evenly as possible.
[[nodiscard]] ElementRun all_reduce_slice(std::int64_t count, int size, int rank);

// The elements that each of `size` ranks sums.
[[nodiscard]] std::vector<ElementRun> slices_of(const ReduceScatter& args, int size);
[[nodiscard]] std::vector<ElementRun> slices_of(const AllReduce& args, int size);

// HostCall::terms of an all-reduce. Leaves out a planned call's divisor and exponents: they follow
// from what its callers compare elsewhere.
[[nodiscard]] std::uint64_t terms_of(const AllReduce& args);

[[nodiscard]] Dtype wire_dtype(const AllReduce& args);
// Whether f32 data is rounded to 16 bits for the wire.
[[nodiscard]] bool rounds_on_wire(const AllReduce& args);

[[nodiscard]] kernels::SumSpec sum_spec(const ReduceScatter& args);
// Rows and results are in the data's dtype.
[[nodiscard]] kernels::SumSpec sum_spec(const AllReduce& args);
// Rows are already rounded to the wire dtype; the total is encoded in it.
[[nodiscard]] kernels::SumSpec wire_sum_spec(const AllReduce& args);

}  // namespace hsdp::comm
