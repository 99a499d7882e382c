#include "hsdp/kernels/sum_rows.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "hsdp/error.h"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/row_pass.h"

namespace hsdp::kernels {
namespace {

constexpr const char* kSumRows = "sum_rows";

void check(const SumRows& args) {
  const SumSpec& spec = args.spec;
  if (args.rows.empty() || args.count < 0) {
    throw UsageError(
        {.where = std::string(kSumRows),
         .expected = "rows and a count of at least 0",
         .got = std::to_string(args.rows.size()) + " rows of " + std::to_string(args.count)});
  }
  if (spec.row_dtype == Dtype::kI64) {
    if (spec.out_dtype != Dtype::kI64 || args.add != nullptr || spec.divisor != 1.0) {
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
  require_one_width(
      spec.row_dtype, spec.out_dtype,
      {spec.send_exponent, spec.sum_exponent, spec.total_exponent, spec.result_exponent}, kSumRows);
  if (spec.row_dtype == Dtype::kF64 && spec.total_dtype != Dtype::kF32) {
    throw UsageError({.where = std::string(kSumRows) + ": rows of f64",
                      .expected = "no total dtype",
                      .got = std::string(name(spec.total_dtype))});
  }
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
  pass.add_dtype = sum_dtype(spec.row_dtype);
  pass.steps.sum_scale = checked_power_of_two(spec.sum_exponent, kSumRows);
  pass.steps.total_dtype = spec.total_dtype;
  if (spec.total_dtype != Dtype::kF32) {
    pass.steps.total_scale = checked_power_of_two(-spec.total_exponent, kSumRows);
  }
  pass.steps.result_scale = checked_power_of_two(spec.result_exponent, kSumRows);
  pass.steps.divisor = narrowed(spec.divisor);
  pass.wide_divisor = spec.divisor;
  pass.outs = args.outs;
  pass.out_dtype = spec.out_dtype;
  pass.count = args.count;
  pass.streaming_stores = args.streaming_stores;
  return pass;
}

// i64 wraps, so sum as unsigned.
void sum_integers(const SumRows& args) {
  constexpr std::int64_t kTile = 512;
  std::array<std::uint64_t, kTile> total;
  std::array<std::uint64_t, kTile> row;
  for (std::int64_t begin = 0; begin < args.count; begin += kTile) {
    const auto bytes =
        static_cast<std::size_t>(std::min(kTile, args.count - begin)) * sizeof(std::uint64_t);
    const auto offset = static_cast<std::size_t>(begin) * sizeof(std::uint64_t);
    std::memcpy(total.data(), static_cast<const char*>(args.rows[0]) + offset, bytes);
    for (const void* const source : args.rows.subspan(1)) {
      std::memcpy(row.data(), static_cast<const char*>(source) + offset, bytes);
      for (std::size_t i = 0; i < bytes / sizeof(std::uint64_t); ++i) total[i] += row[i];
    }
    for (void* const out : args.outs) {
      std::memcpy(static_cast<char*>(out) + offset, total.data(), bytes);
    }
  }
}

void sum(const SumRows& args, std::uint32_t (*run_pass)(const RowPass&)) {
  check(args);
  if (args.spec.row_dtype == Dtype::kI64) return sum_integers(args);
  const RowPass pass = make_pass(args);
  const bool finite = run_pass(pass) < nonfinite_magnitude(pass.out_dtype);
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
  if (args.spec.row_dtype == Dtype::kI64) {
    sum_integers_on_device(args, stream);
  } else {
    run_on_device(make_pass(args), args.nonfinite, stream);
  }
}

void sum_rows_reference(const SumRows& args) { sum(args, run_scalar); }

}  // namespace hsdp::kernels
