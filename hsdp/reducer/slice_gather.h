// Fills full arrays from the slices that the ranks of a shard group own, in place.
//
// Large arrays are gathered straight into their memory; small ones travel together. Everything runs
// inside a task of `stream`.
#pragma once

#include <cstdint>
#include <span>

#include "hsdp/bucket_layout.h"
#include "hsdp/comm/communicator.h"

namespace hsdp::reducer {

struct FullArray {
  int parameter = 0;
  TensorView array;  // contiguous, all elements of the parameter; this rank's slice is in place
};

// Collective; the same parameters and dtypes in the same order on every rank. Returns the number of
// all-gathers it took.
[[nodiscard]] std::int64_t gather_slices(Communicator& shard_group, const BucketLayout& layout,
                                         std::span<const FullArray> arrays, Stream& stream);

}  // namespace hsdp::reducer
