// Turns gradients into rows of a bucket: the arithmetic of one parameter, without any state.
// Everything runs inside a task of `stream`: done when it returns on the host, enqueued on CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hsdp/bucket_layout.h"
#include "hsdp/device/stream.h"
#include "hsdp/tensor_view.h"

namespace hsdp::reducer {

// What one parameter contributes: the fresh gradient, the local sum of earlier microbatches, both,
// or neither (a hole: zeros).
struct Contribution {
  const StridedView* fresh = nullptr;
  TensorView accumulated{};  // data == nullptr: none
  bool hole = false;  // no fresh gradient although the microbatch has one: it counts as zeros
};

// local sum <- local sum + fresh, in the accumulator's dtype.
void add_to_accumulator(const Contribution& contribution, TensorView accumulator,
                        const Stream& stream);

// row <- round((local sum + fresh) * 2^-exponent, wire dtype), for one segment of a bucket.
void pack_segment(const Contribution& contribution, const BucketSegment& segment, int exponent,
                  TensorView staging, const Stream& stream);

// A shard group of one rounds nothing: carry <- carry + (local sum + fresh), all fp32, of the whole
// parameter.
void add_to_carry(const Contribution& contribution, bool accumulate, TensorView carry,
                  const Stream& stream);
// The scratch that it takes, in bytes.
[[nodiscard]] std::size_t add_to_carry_scratch(std::int64_t count, Device device);

}  // namespace hsdp::reducer
