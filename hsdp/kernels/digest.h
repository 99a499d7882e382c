// 64-bit digests of memory, to compare what ranks ought to have alike.
//
// The sum modulo 2^64 of a mix of each 8 bytes and their place. One bit that differs always changes
// it, several do but for one case in 2^64, and it depends on no order of evaluation. Not for
// memory that somebody changes on purpose. The mix is the finalizer of SplitMix64 (Steele, Lea and
// Flood, "Fast splittable pseudorandom number generators", 2014).
#pragma once

#include <cstdint>

#include "hsdp/device/stream.h"
#include "hsdp/tensor_view.h"

namespace hsdp::kernels {

// What `values` adds to a digest of several pieces, of which this one begins at `place`.
[[nodiscard]] std::uint64_t digest(ConstTensorView values, std::uint64_t place = 0);
// How many places that takes.
[[nodiscard]] std::uint64_t digest_places(ConstTensorView values);

// *sum += digest(values, place) inside a task of `stream` [Note: kernels on a stream]. `sum` lies
// in memory that the stream's device and the host reach, as a Buffer's in pinned memory.
void add_digest(ConstTensorView values, std::uint64_t place, std::uint64_t* sum,
                const Stream& stream);

}  // namespace hsdp::kernels
