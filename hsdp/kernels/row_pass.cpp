#include "hsdp/kernels/row_pass.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
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

// Works in tiles, so that the loops run from a cache; rows may lie at any byte address.
std::uint32_t run_wide_range(const RowPass& pass, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kTile = 512;
  std::array<double, kTile> total{};
  std::array<double, kTile> other{};
  bool finite = true;
  for (; begin < end; begin += kTile) {
    const auto length = static_cast<std::size_t>(std::min(kTile, end - begin));
    const auto offset = static_cast<std::size_t>(begin) * sizeof(double);
    const std::size_t bytes = length * sizeof(double);
    const auto load = [&](const void* from, std::array<double, kTile>& to) {
      std::memcpy(to.data(), static_cast<const char*>(from) + offset, bytes);
    };
    if (pass.rows.empty()) {
      total.fill(0.0);
    } else {
      load(pass.rows[0], total);
      for (const void* const row : pass.rows.subspan(1)) {
        load(row, other);
        for (std::size_t i = 0; i < length; ++i) total[i] += other[i];
      }
    }
    if (pass.add != nullptr) load(pass.add, other);
    for (std::size_t i = 0; i < length; ++i) {
      total[i] = finish_wide(total[i], pass.add != nullptr, other[i], pass.wide_divisor,
                             pass.wide_multiplier);
      finite = finite && std::isfinite(total[i]);
    }
    for (void* const out : pass.outs) {
      std::memcpy(static_cast<char*>(out) + offset, total.data(), bytes);
    }
  }
  return finite ? 0 : kNonfinite;
}

namespace {

// Opaque to the compiler: see DefaultFloatEnvironment.
using Range = std::uint32_t (*)(const RowPass&, std::int64_t, std::int64_t);
const volatile Range scalar_range = run_scalar_range;
const volatile Range wide_range = run_wide_range;

float narrow(double value) { return static_cast<float>(value); }
float (*const volatile narrow_in_environment)(double) = narrow;

}  // namespace

std::uint32_t run_scalar(const RowPass& pass) {
  const DefaultFloatEnvironment environment;
  return (is_wide(pass) ? wide_range : scalar_range)(pass, 0, pass.count);
}

float narrowed(double value) {
  const DefaultFloatEnvironment environment;
  return narrow_in_environment(value);
}

void require_one_width(Dtype one, Dtype other, std::initializer_list<int> exponents,
                       const char* kernel) {
  if ((one == Dtype::kF64) != (other == Dtype::kF64)) {
    throw UsageError({.where = kernel,
                      .expected = "f64 alone, or none",
                      .got = std::string(name(one)) + " and " + std::string(name(other))});
  }
  for (const int exponent : exponents) {
    if (one != Dtype::kF64 || exponent == 0) continue;
    throw UsageError({.where = std::string(kernel) + ": f64",
                      .expected = "no exponent",
                      .got = std::to_string(exponent)});
  }
}

void require_gradient_dtype(Dtype dtype, const char* kernel, const char* what) {
  if (is_gradient_dtype(dtype)) return;
  throw UsageError({.where = std::string(kernel) + ": " + what,
                    .expected = "f32, bf16, f16 or f64",
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
