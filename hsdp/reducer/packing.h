// Turns gradients into rows of a bucket: the arithmetic of one parameter, without state. On the
// host done on return, on a GPU when the queue is launched.
#pragma once

#include <cstdint>

#include "hsdp/bucket_layout.h"
#include "hsdp/kernels/pack_queue.h"
#include "hsdp/tensor_view.h"

namespace hsdp::reducer {

// What one parameter contributes: a fresh gradient, the local sum of earlier microbatches, both, or
// zeros.
struct Contribution {
  const StridedView* fresh = nullptr;
  TensorView accumulated{};  // data == nullptr: none
  bool hole = false;         // the microbatch has gradients, but none of this parameter
};

// local sum <- local sum + fresh, in the accumulator's dtype.
void add_to_accumulator(const Contribution& contribution, TensorView accumulator,
                        kernels::PackQueue& queue);

// row <- round((local sum + fresh) * 2^-exponent, wire dtype), for one segment of a bucket.
void pack_segment(const Contribution& contribution, const BucketSegment& segment, int exponent,
                  TensorView staging, kernels::PackQueue& queue);

// In a shard group of one, which rounds nothing: carry <- carry + (local sum + fresh), all fp32,
// for the elements from `begin` on that `carry` holds.
void add_to_carry(const Contribution& contribution, bool accumulate, std::int64_t begin,
                  TensorView carry, kernels::PackQueue& queue);

}  // namespace hsdp::reducer
