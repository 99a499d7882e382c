// Uses the scalar definitions instead of the SIMD kernels, for machines without the SIMD library.
#include <algorithm>
#include <cstring>

#include "hsdp/kernels/norm_lanes.h"
#include "hsdp/kernels/row_pass.h"
#include "hsdp/kernels/transpose.h"
#include "quant/quantize_kernels.h"
#include "zero/adamw_kernels.h"

namespace hsdp::kernels {

std::uint32_t run(const RowPass& pass) { return run_scalar(pass); }

void sum_chunk_squares(ConstTensorView values, double* sums) {
  sum_chunk_squares_scalar(values, sums);
}

bool find_nonfinite(ConstTensorView values) { return has_nonfinite_range(values, 0); }

void gather(const StridedBlock& block, std::byte* out) {
  const auto bytes = static_cast<std::int64_t>(block.element_bytes);
  for (std::int64_t r = 0; r < block.rows; ++r) {
    for (std::int64_t c = 0; c < block.columns; ++c) {
      std::memcpy(out + (r * block.out_stride + c) * bytes,
                  block.data + (r * block.row_stride + c * block.column_stride) * bytes,
                  block.element_bytes);
    }
  }
}

}  // namespace hsdp::kernels

namespace hsdp::quant {

bool quantize_simd(const Quantize& args) { return quantize_scalar(args); }

bool dequantize_simd(const Dequantize& args) { return dequantize_scalar(args); }

}  // namespace hsdp::quant

namespace hsdp::zero {

void adamw_simd(const AdamWSlice& slice, const AdamWNumbers& numbers) {
  adamw_reference(slice, numbers);
}

}  // namespace hsdp::zero
