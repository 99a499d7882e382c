// 64-bit digests of memory, for comparing values that should be equal on all ranks.
//
// The sum modulo 2^64 of a mix of each 8 bytes and their place. A change of one bit always changes
// the digest, and a larger change does except in one case in 2^64. The digest does not depend on
// the order of evaluation. It is no protection against deliberate changes. The mix is the finalizer
// of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
#pragma once

#include <cstdint>

#include "hsdp/device/stream.h"
#include "hsdp/tensor_view.h"

namespace hsdp::kernels {

// The contribution of `values` to a digest of several pieces, when this piece begins at `place`.
[[nodiscard]] std::uint64_t digest(ConstTensorView values, std::uint64_t place = 0);
// How many places `values` take.
[[nodiscard]] std::uint64_t digest_places(ConstTensorView values);

// *sum += digest(values, place) inside a task of `stream` [Note: kernels on a stream]. `sum` is in
// memory that the stream's device reaches: its own, or a Buffer of pinned memory.
void add_digest(ConstTensorView values, std::uint64_t place, std::uint64_t* sum,
                const Stream& stream);

}  // namespace hsdp::kernels
