#include "hsdp/kernels/row_pass.h"

#include <algorithm>
#include <string>

#include "hsdp/error.h"
#include "hsdp/kernels/float_environment.h"

namespace hsdp::kernels {

std::uint32_t run_scalar_range(const RowPass& pass, std::int64_t begin, std::int64_t end) {
  std::uint32_t largest = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    float sum = 0.0F;
    for (std::size_t r = 0; r < pass.rows.size(); ++r) {
      const float value =
          as_sent(decode(pass.rows[r], i, pass.row_dtype), pass.send_scale, pass.wire_dtype);
      sum = r == 0 ? value : sum + value;
    }
    const float add = pass.add == nullptr ? 0.0F : decode(pass.add, i, pass.add_dtype);
    const float result = finish(sum, pass.add != nullptr, add, pass.steps);
    largest = std::max(largest, magnitude_bits(result));
    for (void* const out : pass.outs) encode(result, out, i, pass.out_dtype);
  }
  return largest;
}

namespace {

// Through a pointer that the compiler cannot see through: see DefaultFloatEnvironment.
std::uint32_t (*volatile scalar_range)(const RowPass&, std::int64_t,
                                       std::int64_t) = run_scalar_range;

}  // namespace

std::uint32_t run_scalar(const RowPass& pass) {
  const DefaultFloatEnvironment environment;
  return scalar_range(pass, 0, pass.count);
}

void require_gradient_dtype(Dtype dtype, const char* kernel, const char* what) {
  if (is_gradient_dtype(dtype)) return;
  throw UsageError({.where = std::string(kernel) + ": " + what,
                    .expected = "f32, bf16 or f16",
                    .got = std::string(name(dtype))});
}

float checked_power_of_two(int exponent, const char* kernel) {
  if (exponent < -126 || exponent > 126) {
    throw UsageError({.where = std::string(kernel),
                      .expected = "an exponent from -126 to 126",
                      .got = std::to_string(exponent)});
  }
  return power_of_two(exponent);
}

}  // namespace hsdp::kernels
