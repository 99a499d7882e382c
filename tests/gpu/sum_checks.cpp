#include <deque>

#include "check.h"
#include "device_row.h"
#include "hsdp/device/flag.h"
#include "hsdp/error.h"
#include "hsdp/kernels/sum_rows.h"

namespace hsdp::gpu {
namespace {

using kernels::SumRows;
using kernels::SumSpec;

struct Shape2 {
  std::size_t rows = 1;
  std::size_t outs = 1;
  std::int64_t count = 0;
  bool has_add = false;
  bool even = false;  // rows are at equal distances, as in one buffer
};

std::string describe(const SumSpec& spec, const Shape2& shape) {
  return " with " + std::to_string(shape.rows) + " rows of " + std::to_string(shape.count) + " " +
         std::string(name(spec.row_dtype)) + ", wire " + std::string(name(spec.wire_dtype)) +
         " 2^-" + std::to_string(spec.send_exponent) + ", total " +
         std::string(name(spec.total_dtype)) + ", divisor " + std::to_string(spec.divisor) +
         ", to " + std::to_string(shape.outs) + " " + std::string(name(spec.out_dtype)) +
         (shape.has_add ? ", with add" : "") + (shape.even ? ", even rows" : "");
}

// The rows of one call, on the device and on the host.
struct Rows {
  Rows(const SumSpec& spec, const Shape2& shape, std::mt19937& random, const Stream& stream) {
    const auto bytes = static_cast<std::int64_t>(size_bytes(spec.row_dtype));
    const auto rows = static_cast<std::int64_t>(shape.rows);
    const std::int64_t distance = shape.count + static_cast<std::int64_t>(random() % 9);
    for (std::int64_t r = 0; r < rows; ++r) {
      if (r == 0 || !shape.even) {
        const std::int64_t count = shape.even ? rows * distance : shape.count;
        memory.emplace_back(spec.row_dtype, count, random() % 16, stream).fill(random);
      }
      const std::int64_t offset = shape.even ? r * distance * bytes : 0;
      device.push_back(memory.back().data() + offset);
      host.push_back(memory.back().host() + offset);
    }
  }

  std::deque<DeviceRow> memory;
  std::vector<const void*> device;
  std::vector<const void*> host;
};

std::string check_sum(const SumSpec& spec, const Shape2& shape, std::mt19937& random,
                      const Stream& stream) {
  const Rows rows(spec, shape, random, stream);
  DeviceRow add(Dtype::kF32, shape.count, random() % 16, stream);
  add.fill(random);
  std::deque<DeviceRow> outs;
  std::vector<void*> targets;
  for (std::size_t o = 0; o < shape.outs; ++o) {
    targets.push_back(outs.emplace_back(spec.out_dtype, shape.count, random() % 16, stream).data());
  }
  DeviceRow expected(spec.out_dtype, shape.count, 0, stream);
  void* const expected_out = expected.host();
  std::atomic<std::uint32_t> flag = 0;
  const Flag device_flag = make_flag(stream.device());
  SumRows args{.spec = spec,
               .rows = rows.host,
               .add = shape.has_add ? reinterpret_cast<const float*>(add.host()) : nullptr,
               .outs = {&expected_out, 1},
               .count = shape.count,
               .nonfinite = &flag};
  sum_rows_reference(args);
  args.rows = rows.device;
  if (shape.has_add) args.add = reinterpret_cast<const float*>(add.data());
  args.outs = targets;
  args.nonfinite = device_flag.get();
  sum_rows(args, stream);
  for (DeviceRow& out : outs) {
    const std::string found = out.difference(expected);
    if (!found.empty()) return found + describe(spec, shape);
  }
  return *device_flag == flag ? "" : "the non-finite flags differ" + describe(spec, shape);
}

std::vector<SumSpec> all_specs() {
  std::vector<SumSpec> specs;
  for (const Dtype row : kGradientDtypes) {
    for (const Dtype wire : kGradientDtypes) {
      if (row != Dtype::kF32 && wire != row) continue;
      for (const Dtype total : kGradientDtypes) {
        for (const float divisor : {1.0F, 8.0F, 0.7F}) {
          for (const Dtype out : kGradientDtypes) {
            specs.push_back({row, wire, 3, 2, total, 4, 5, divisor, out});
            specs.push_back({row, wire, 0, 0, total, 0, 0, divisor, out});
          }
        }
      }
    }
  }
  return specs;
}

std::string check_specs(const Stream& stream) {
  std::mt19937 random(1);
  constexpr std::size_t kRowCounts[] = {1, 2, 3, 4, 5, 8, 13};
  for (const SumSpec& spec : all_specs()) {
    for (const bool has_add : {false, true}) {
      const Shape2 shape{kRowCounts[random() % std::size(kRowCounts)], 1 + random() % 3,
                         static_cast<std::int64_t>(random() % 300), has_add, random() % 2 == 0};
      if (std::string found = check_sum(spec, shape, random, stream); !found.empty()) return found;
    }
  }
  return {};
}

std::string check_counts(const Stream& stream) {
  std::mt19937 random(2);
  for (const Dtype row : kGradientDtypes) {
    for (const Dtype out : kGradientDtypes) {
      const SumSpec spec{.row_dtype = row, .divisor = 3.0F, .out_dtype = out};
      for (std::int64_t count = 0; count <= 70; ++count) {
        const Shape2 shape{1 + random() % 3, 1 + random() % 2, count, count % 2 == 0,
                           random() % 2 == 0};
        const std::string found = check_sum(spec, shape, random, stream);
        if (!found.empty()) return found;
      }
    }
  }
  return {};
}

std::string check_many_rows(std::int64_t count, const Stream& stream) {
  std::mt19937 random(3);
  for (const Dtype row : kGradientDtypes) {
    const SumSpec spec{.row_dtype = row, .divisor = 64.0F};
    for (const auto& [rows, even] : {std::pair{64, false}, {400, false}, {1000, true}}) {
      const Shape2 shape{static_cast<std::size_t>(rows), 1, 77, true, even};
      if (std::string found = check_sum(spec, shape, random, stream); !found.empty()) return found;
    }
    const std::string found = check_sum(spec, {4, 1, count, true, true}, random, stream);
    if (!found.empty()) return found;
  }
  return {};
}

// Checks sums in place, where the output is a row or the carry.
std::string check_in_place(const Stream& stream) {
  std::mt19937 random(4);
  for (int repeat = 0; repeat < 40; ++repeat) {
    const auto count = static_cast<std::int64_t>(random() % 4000);
    DeviceRow row(Dtype::kF32, count, random() % 8, stream);
    DeviceRow carry(Dtype::kF32, count, random() % 8, stream);
    row.fill(random);
    carry.fill(random);
    DeviceRow expected(Dtype::kF32, count, 0, stream);
    void* out = expected.host();
    const void* in = row.host();
    SumRows args{.rows = {&in, 1},
                 .add = reinterpret_cast<const float*>(carry.host()),
                 .outs = {&out, 1},
                 .count = count};
    sum_rows_reference(args);
    in = row.data();
    args.add = reinterpret_cast<const float*>(carry.data());
    DeviceRow& target = repeat % 2 == 0 ? row : carry;
    out = target.data();
    sum_rows(args, stream);
    if (std::string found = target.difference(expected); !found.empty()) return found;
  }
  return {};
}

template <class T>
std::string check_wide(Dtype dtype, const Stream& stream) {
  std::mt19937_64 random(5);
  constexpr std::size_t kRowCount = 3000;
  std::vector<T> host(3 * kRowCount);
  for (T& value : host) value = static_cast<T>(static_cast<std::int64_t>(random()));
  Buffer memory(stream.device(), 4 * kRowCount * sizeof(T));
  copy_bytes(memory.data(), host.data(), host.size() * sizeof(T), stream);
  const std::byte* const data = memory.data();
  const std::vector<const void*> rows{data, data + kRowCount * sizeof(T),
                                      data + 2 * kRowCount * sizeof(T)};
  void* out = memory.data() + 3 * kRowCount * sizeof(T);
  kernels::sum_rows({.spec = {.row_dtype = dtype, .out_dtype = dtype},
                     .rows = rows,
                     .outs = {&out, 1},
                     .count = kRowCount},
                    stream);
  std::vector<T> got(kRowCount);
  copy_bytes(got.data(), out, kRowCount * sizeof(T), stream);
  Stream(stream).synchronize();
  for (std::size_t i = 0; i < kRowCount; ++i) {
    if (got[i] != host[i] + host[kRowCount + i] + host[2 * kRowCount + i]) {
      return std::string(name(dtype)) + ": element " + std::to_string(i) + " differs";
    }
  }
  return {};
}

// A call that the kernel cannot take must throw.
std::string check_refusals(const Stream& stream) {
  DeviceRow row(Dtype::kF32, 64, 0, stream);
  const auto refuses = [&](std::size_t rows, std::size_t outs, std::ptrdiff_t shift) {
    std::vector<const void*> sources(rows, row.data());
    if (rows > 1) sources.back() = row.data() + 16;
    std::vector<void*> targets(outs, row.data() + shift);
    try {
      kernels::sum_rows({.rows = sources, .outs = targets, .count = 8}, stream);
    } catch (const UsageError&) {
      return true;
    }
    return false;
  };
  if (!refuses(401, 1, 0)) return "401 uneven rows were taken";
  if (!refuses(1, 9, 0)) return "9 outputs were taken";
  if (!refuses(1, 1, 2)) return "an output that is not aligned was taken";
  return {};
}

}  // namespace

std::vector<Check> sum_checks(Effort effort) {
  const std::int64_t count = effort == Effort::kFull ? 20'000'003 : 100'003;
  return {
      {"sum of rows: every spec", check_specs},
      {"sum of rows: every count and alignment", check_counts},
      {"sum of rows: many rows, long rows",
       [count](const Stream& stream) { return check_many_rows(count, stream); }},
      {"sum of rows: in place", check_in_place},
      {"sum of rows: f64",
       [](const Stream& stream) { return check_wide<double>(Dtype::kF64, stream); }},
      {"sum of rows: i64 wraps",
       [](const Stream& stream) { return check_wide<std::uint64_t>(Dtype::kI64, stream); }},
      {"sum of rows: refuses what it cannot take", check_refusals},
  };
}

}  // namespace hsdp::gpu
