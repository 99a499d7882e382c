// The single pass over memory behind every element-wise kernel: rows -> sum -> steps of
// arithmetic.h -> outputs. Internal to hsdp/kernels.
//
// Element i of every output depends only on element i of the inputs and is written after they are
// read: an output may alias an input exactly, never partly.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "hsdp/dtype.h"
#include "hsdp/kernels/arithmetic.h"

namespace hsdp::kernels {

// Rows, `add` and outputs are either all f64 or all not.
struct RowPass {
  std::span<const void* const> rows;  // empty: the sum is zero
  Dtype row_dtype = Dtype::kF32;
  Dtype wire_dtype = Dtype::kF32;  // 16-bit: round f32 rows through it
  float send_scale = 1.0F;
  const void* add = nullptr;
  Dtype add_dtype = Dtype::kF32;
  ElementSteps steps;
  double wide_divisor = 1.0;  // for f64: replaces steps.divisor; likewise below
  double wide_multiplier = 1.0;
  std::span<void* const> outs;
  Dtype out_dtype = Dtype::kF32;
  std::int64_t count = 0;
  bool streaming_stores = false;
};

// Runs the pass on the calling thread. Returns the largest magnitude_bits() of a result before it
// is rounded to out_dtype; from nonfinite_magnitude(out_dtype) up, a result is not finite.
std::uint32_t run(const RowPass& pass);

// Like run(), but one element at a time, by the functions of arithmetic.h.
std::uint32_t run_scalar(const RowPass& pass);

// Elements [begin, end) in the caller's floating-point environment.
std::uint32_t run_scalar_range(const RowPass& pass, std::int64_t begin, std::int64_t end);

// Elements [begin, end) of an f64 pass: kNonfinite or 0.
std::uint32_t run_wide_range(const RowPass& pass, std::int64_t begin, std::int64_t end);
[[nodiscard]] inline bool is_wide(const RowPass& pass) { return pass.out_dtype == Dtype::kF64; }

// Throws UsageError unless the kernels support `dtype`; `what` names the argument.
void require_gradient_dtype(Dtype dtype, const char* kernel, const char* what);

// Throws UsageError if only one of the two is f64, or if f64 comes with an exponent.
void require_one_width(Dtype one, Dtype other, std::initializer_list<int> exponents,
                       const char* kernel);

// Rounds to fp32, whatever the caller's floating-point environment.
[[nodiscard]] float narrowed(double value);

// power_of_two(); throws UsageError outside -126..126.
[[nodiscard]] float checked_power_of_two(int exponent, const char* kernel);

}  // namespace hsdp::kernels
