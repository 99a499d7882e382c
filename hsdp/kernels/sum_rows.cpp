#include "hsdp/kernels/sum_rows.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "hsdp/error.h"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/float_environment.h"
#include "hsdp/kernels/row_pass.h"

namespace hsdp::kernels {
namespace {

constexpr const char* kSumRows = "sum_rows";

// f64 and i64: rounded by nothing, scaled by nothing.
bool is_plain_sum_dtype(Dtype dtype) { return dtype == Dtype::kF64 || dtype == Dtype::kI64; }

void check(const SumRows& args) {
  const SumSpec& spec = args.spec;
  if (args.rows.empty() || args.count < 0) {
    throw UsageError(
        {.where = std::string(kSumRows),
         .expected = "rows and a count of at least 0",
         .got = std::to_string(args.rows.size()) + " rows of " + std::to_string(args.count)});
  }
  if (is_plain_sum_dtype(spec.row_dtype)) {
    if (spec.out_dtype != spec.row_dtype || args.add != nullptr || spec.divisor != 1.0F) {
      throw UsageError(
          {.where = std::string(kSumRows) + ": rows of " + std::string(name(spec.row_dtype)),
           .expected = "the same output dtype, no divisor and no carry",
           .got =
               std::string(name(spec.out_dtype)) + " and divisor " + std::to_string(spec.divisor)});
    }
    return;
  }
  require_gradient_dtype(spec.row_dtype, kSumRows, "row dtype");
  require_gradient_dtype(spec.wire_dtype, kSumRows, "wire dtype");
  require_gradient_dtype(spec.total_dtype, kSumRows, "total dtype");
  require_gradient_dtype(spec.out_dtype, kSumRows, "output dtype");
}

RowPass make_pass(const SumRows& args) {
  const SumSpec& spec = args.spec;
  RowPass pass;
  pass.rows = args.rows;
  pass.row_dtype = spec.row_dtype;
  if (spec.row_dtype == Dtype::kF32 && spec.wire_dtype != Dtype::kF32) {
    pass.wire_dtype = spec.wire_dtype;
    pass.send_scale = checked_power_of_two(-spec.send_exponent, kSumRows);
  }
  pass.add = args.add;
  pass.steps.sum_scale = checked_power_of_two(spec.sum_exponent, kSumRows);
  pass.steps.total_dtype = spec.total_dtype;
  if (spec.total_dtype != Dtype::kF32) {
    pass.steps.total_scale = checked_power_of_two(-spec.total_exponent, kSumRows);
  }
  pass.steps.result_scale = checked_power_of_two(spec.result_exponent, kSumRows);
  pass.steps.divisor = spec.divisor;
  pass.outs = args.outs;
  pass.out_dtype = spec.out_dtype;
  pass.count = args.count;
  pass.streaming_stores = args.streaming_stores;
  return pass;
}

// T is how the sum is done: i64 wraps, so it sums as unsigned.
template <class T>
bool sum_wide_rows(const SumRows& args) {
  constexpr std::int64_t kTile = 512;
  std::array<T, kTile> total;
  std::array<T, kTile> row;
  bool finite = true;
  for (std::int64_t begin = 0; begin < args.count; begin += kTile) {
    const auto length = static_cast<std::size_t>(std::min(kTile, args.count - begin));
    const auto offset = static_cast<std::size_t>(begin) * sizeof(T);
    std::memcpy(total.data(), static_cast<const char*>(args.rows[0]) + offset, length * sizeof(T));
    for (const void* const source : args.rows.subspan(1)) {
      std::memcpy(row.data(), static_cast<const char*>(source) + offset, length * sizeof(T));
      for (std::size_t i = 0; i < length; ++i) total[i] += row[i];
    }
    for (std::size_t i = 0; i < length; ++i) {
      if constexpr (std::is_floating_point_v<T>) finite = finite && std::isfinite(total[i]);
    }
    for (void* const out : args.outs) {
      std::memcpy(static_cast<char*>(out) + offset, total.data(), length * sizeof(T));
    }
  }
  return finite;
}

bool sum_wide(const SumRows& args) {
  return args.spec.row_dtype == Dtype::kF64 ? sum_wide_rows<double>(args)
                                            : sum_wide_rows<std::uint64_t>(args);
}

// Through a pointer that the compiler cannot see through: see DefaultFloatEnvironment.
bool (*volatile wide_sum)(const SumRows&) = sum_wide;

void sum(const SumRows& args, std::uint32_t (*run_pass)(const RowPass&)) {
  check(args);
  bool finite = true;
  if (is_plain_sum_dtype(args.spec.row_dtype)) {
    const DefaultFloatEnvironment environment;
    finite = wide_sum(args);
  } else {
    const RowPass pass = make_pass(args);
    finite = run_pass(pass) < nonfinite_magnitude(pass.out_dtype);
  }
  if (!finite && args.nonfinite != nullptr) args.nonfinite->store(1, std::memory_order_relaxed);
}

}  // namespace

void sum_rows(const SumRows& args) { sum(args, run); }

void sum_rows(const SumRows& args, const Stream& stream) {
  if (stream.device().type == DeviceType::kHost) {
    sum_rows(args);
    return;
  }
  check(args);
  if (is_plain_sum_dtype(args.spec.row_dtype)) {
    sum_wide_on_device(args, stream);
  } else {
    run_on_device(make_pass(args), args.nonfinite, stream);
  }
}

void sum_rows_reference(const SumRows& args) { sum(args, run_scalar); }

}  // namespace hsdp::kernels
