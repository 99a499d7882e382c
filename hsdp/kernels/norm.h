// Squared L2 norm and non-finite detection.
//
// The norm sums squares in fp64: within a chunk of 1024 elements over 16 interleaved lanes (element
// i goes to lane i mod 16), then the lanes pairwise (0+8, 1+9, ...; 0+4, ...; 0+2, 1+3; 0+1). The
// sums of the chunks are summed the same way until one is left [Note: the order of a norm]. The
// order is fixed, so the bits do not depend on the SIMD width or the device. Squares of f64
// elements are rounded to fp64; all others are exact in it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "hsdp/device/stream.h"
#include "hsdp/tensor_view.h"

namespace hsdp::kernels {

[[nodiscard]] double squared_norm(ConstTensorView values);
[[nodiscard]] double squared_norm_reference(ConstTensorView values);

// True when any element is NaN or infinite.
[[nodiscard]] bool has_nonfinite(ConstTensorView values);
[[nodiscard]] bool has_nonfinite_reference(ConstTensorView values);

// Like the functions above, inside a task of `stream` [Note: kernels on a stream]. All values have
// one dtype, and each sum lies in the memory of its values; a GPU takes a few launches for all of
// them. `nonfinite` is a make_flag() word of that device; it is set to 1 and never cleared.
struct SquaredNorm {
  ConstTensorView values;
  double* sum = nullptr;
};
void squared_norms(std::span<const SquaredNorm> norms, const Stream& stream);
// The scratch that squared_norms() takes on a GPU, in bytes.
[[nodiscard]] std::size_t squared_norms_scratch(std::span<const SquaredNorm> norms);
void find_nonfinite(ConstTensorView values, std::atomic<std::uint32_t>* nonfinite,
                    const Stream& stream);
// *out = 1 when `word` is not 0, else 0. `word` is a make_flag() word or an f32 sum of such
// results; it may be `out`.
void indicate(const void* word, float* out, const Stream& stream);
// On a GPU only. If `word`, a make_flag() word, is not 0: sets every element of `out` to NaN
// (integers to -1), and *nonfinite to 1 unless it is nullptr.
void poison(const std::atomic<std::uint32_t>& word, TensorView out,
            std::atomic<std::uint32_t>* nonfinite, const Stream& stream);

}  // namespace hsdp::kernels
