// The one reduction kernel: rows of a group -> fp32 sum -> optional carry -> optional rounding to a
// wire dtype -> one division -> one or several outputs, in a single pass.
//
//   in_r   = decode(rows[r])                                   16-bit rows, or f32 rows as they are
//          | decode(round(rows[r] * 2^-send_exponent, wire))   f32 rows that travel in 16 bit
//   t      = in_0 + in_1 + ...                                 fp32, ascending rank
//   t      = t * 2^sum_exponent                                exact
//   t      = add + t                                           when `add` is given
//   t      = decode(round(t * 2^-total_exponent, total_dtype)) when total_dtype is 16-bit
//   result = t * 2^result_exponent / divisor                   IEEE division
//
// The bits do not depend on the tile, the SIMD width or the thread. f64 rows take the same steps in
// fp64, without rounding or exponents. i64 rows are summed without `add` and without a divisor.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "hsdp/device/stream.h"
#include "hsdp/dtype.h"

namespace hsdp::kernels {

struct SumSpec {
  Dtype row_dtype = Dtype::kF32;
  Dtype wire_dtype = Dtype::kF32;  // 16-bit with f32 rows: round each row in registers
  int send_exponent = 0;
  int sum_exponent = 0;
  Dtype total_dtype = Dtype::kF32;
  int total_exponent = 0;
  int result_exponent = 0;
  double divisor = 1.0;           // rounded to fp32 unless the rows are f64
  Dtype out_dtype = Dtype::kF32;  // f32, or a 16-bit type: the result rounded once
};

struct SumRows {
  SumSpec spec;
  std::span<const void* const> rows;  // each `count` elements of spec.row_dtype; may alias outs[i]
                                      // exactly, never partly
  const void* add = nullptr;    // `count` fp32, or f64 with f64 rows; may alias an output exactly
  std::span<void* const> outs;  // each `count` elements of spec.out_dtype, same bytes
  std::int64_t count = 0;
  std::atomic<std::uint32_t>* nonfinite = nullptr;  // set to 1 when a result is not finite; on
                                                    // CUDA a make_flag() word of the device
  bool streaming_stores = false;  // for outputs larger than the cache: write around it
};

// On the calling thread, in host memory.
void sum_rows(const SumRows& args);

// Inside a task of `stream`, in memory of its device [Note: kernels on a stream]. CUDA takes up to
// 8 outputs, and any number of rows at equal distances or 400 at unequal ones.
void sum_rows(const SumRows& args, const Stream& stream);

// The scalar definition that every implementation must equal bit for bit.
void sum_rows_reference(const SumRows& args);

}  // namespace hsdp::kernels
