// One pass over memory that every element-wise kernel is made of: rows -> sum -> steps of
// arithmetic.h -> outputs. Internal to hsdp/kernels.
//
// Element i of every output depends on element i of the inputs only, and is written after they were
// read: an output may alias an input exactly, never partly.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>

#include "hsdp/dtype.h"
#include "hsdp/kernels/arithmetic.h"

namespace hsdp::kernels {

// Rows, `add` and outputs are all of f64 or none is.
struct RowPass {
  std::span<const void* const> rows;  // empty: the sum is zero
  Dtype row_dtype = Dtype::kF32;
  Dtype wire_dtype = Dtype::kF32;  // 16-bit: round f32 rows through it
  float send_scale = 1.0F;
  const void* add = nullptr;
  Dtype add_dtype = Dtype::kF32;
  ElementSteps steps;
  double wide_divisor = 1.0;  // of f64, in place of the steps' own; so the multiplier
  double wide_multiplier = 1.0;
  std::span<void* const> outs;
  Dtype out_dtype = Dtype::kF32;
  std::int64_t count = 0;
  bool streaming_stores = false;
};

// Runs the pass on the calling thread. Returns the largest magnitude_bits() of a result before it
// is rounded to out_dtype: at or above nonfinite_magnitude(out_dtype), something was not finite.
std::uint32_t run(const RowPass& pass);

// The same, one element at a time, by the functions of arithmetic.h.
std::uint32_t run_scalar(const RowPass& pass);

// Elements [begin, end) in the caller's floating-point environment.
std::uint32_t run_scalar_range(const RowPass& pass, std::int64_t begin, std::int64_t end);

// Elements [begin, end) of an f64 pass: kNonfinite or 0.
std::uint32_t run_wide_range(const RowPass& pass, std::int64_t begin, std::int64_t end);
[[nodiscard]] inline bool is_wide(const RowPass& pass) { return pass.out_dtype == Dtype::kF64; }

// UsageError unless it is a dtype that passes through the kernels; `what` names the argument.
void require_gradient_dtype(Dtype dtype, const char* kernel, const char* what);

// UsageError where one is f64 and the other is not, or where f64 comes with an exponent.
void require_one_width(Dtype one, Dtype other, std::initializer_list<int> exponents,
                       const char* kernel);

// To fp32, whatever floating-point environment the caller has.
[[nodiscard]] float narrowed(double value);

// power_of_two(); UsageError outside -126..126.
[[nodiscard]] float checked_power_of_two(int exponent, const char* kernel);

}  // namespace hsdp::kernels
