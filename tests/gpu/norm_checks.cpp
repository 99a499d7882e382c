#include <array>
#include <bit>
#include <cmath>
#include <deque>
#include <limits>
#include <vector>

#include "check.h"
#include "device_row.h"
#include "hsdp/device/flag.h"
#include "hsdp/kernels/clip.h"
#include "hsdp/kernels/digest.h"
#include "hsdp/kernels/norm.h"

namespace hsdp::gpu {
namespace {

// Checks the norms of all rows in one call.
std::string check_norms_of(std::deque<DeviceRow>& rows, const Stream& stream) {
  const Buffer sums(stream.device(), rows.size() * sizeof(double));
  std::vector<kernels::SquaredNorm> norms;
  for (DeviceRow& row : rows) {
    norms.push_back({row.view(), reinterpret_cast<double*>(sums.data()) + norms.size()});
  }
  kernels::squared_norms(norms, stream);
  std::vector<double> got(rows.size(), -1.0);
  copy_bytes(got.data(), sums.data(), rows.size() * sizeof(double), stream);
  Stream(stream).synchronize();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double expected = kernels::squared_norm_reference(rows[i].host_view());
    if (got[i] == expected || (std::isnan(got[i]) && std::isnan(expected))) continue;
    return "norm of " + std::to_string(rows[i].count()) + " " + std::string(name(rows[i].dtype())) +
           ": expected " + std::to_string(expected) + ", got " + std::to_string(got[i]);
  }
  return {};
}

// Finite values of very different sizes, so that another order of additions changes the sum.
void fill_finite(DeviceRow& row, std::mt19937& random) {
  for (std::int64_t i = 0; i < row.count(); ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    const auto value =
        std::bit_cast<float>((bits & 0x807fffffU) | ((107U + (bits >> 8) % 30U) << 23));
    kernels::encode(value, row.host(), i, row.dtype());
  }
  row.upload();
}

std::string check_norms(std::int64_t largest, const Stream& stream) {
  std::mt19937 random(1);
  for (const Dtype dtype : kGradientDtypes) {
    std::deque<DeviceRow> rows;
    for (const std::int64_t count : std::vector<std::int64_t>{0, 1, 7, 15, 16, 1023, 1024, 1025,
                                                              50000, 1024 * 1024 + 1, largest}) {
      fill_finite(rows.emplace_back(dtype, count, random() % 16, stream), random);
    }
    for (int i = 0; i < 150; ++i) {  // too many rows for one launch
      const auto count = static_cast<std::int64_t>(random() % 3000);
      DeviceRow& row = rows.emplace_back(dtype, count, random() % 16, stream);
      fill_finite(row, random);
      if (i % 3 == 0) row.fill(random);
    }
    if (std::string found = check_norms_of(rows, stream); !found.empty()) return found;
  }
  return {};
}

bool finds(DeviceRow& row, const Stream& stream) {
  const Flag flag = make_flag(stream.device());
  kernels::find_nonfinite(row.view(), flag.get(), stream);
  Stream(stream).synchronize();
  return *flag != 0;
}

std::string check_nonfinite(const Stream& stream) {
  std::mt19937 random(2);
  for (const Dtype dtype : kGradientDtypes) {
    for (const std::int64_t count : {1, 7, 64, 130, 255, 40000}) {
      DeviceRow row(dtype, count, random() % 16, stream);
      const float largest = dtype == Dtype::kF16    ? 65504.0F
                            : dtype == Dtype::kBf16 ? std::bit_cast<float>(0x7f7f0000U)
                                                    : std::numeric_limits<float>::max();
      for (std::int64_t i = 0; i < count; ++i) kernels::encode(-largest, row.host(), i, dtype);
      row.upload();
      if (finds(row, stream)) return "the largest finite values were called non-finite";
      for (int repeat = 0; repeat < 12; ++repeat) {
        const auto place = static_cast<std::int64_t>(random()) % count;
        const float bad = repeat % 2 == 0 ? std::numeric_limits<float>::quiet_NaN()
                                          : -std::numeric_limits<float>::infinity();
        kernels::encode(bad, row.host(), place, dtype);
        row.upload();
        if (!finds(row, stream)) {
          return "element " + std::to_string(place) + " of " + std::to_string(count) +
                 " was not found";
        }
        kernels::encode(largest, row.host(), place, dtype);
      }
    }
  }
  return {};
}

std::string check_product(DeviceRow& row, float by, const double* factor, const Stream& stream) {
  DeviceRow expected(Dtype::kF32, row.count(), 0, stream);
  for (std::int64_t i = 0; i < row.count(); ++i) {
    kernels::encode(row.at(i) * by, expected.host(), i, Dtype::kF32);
  }
  kernels::scale_by({row.data(), row.count(), Dtype::kF32, stream.device()}, factor, stream);
  return row.difference(expected);
}

// Compares the ordered sum, the factor and the product of clipping with the host's.
std::string check_clip(const Stream& stream) {
  std::mt19937 random(3);
  for (const std::int64_t count : {1, 3, 7, 8, 9, 31, 4097, 100003}) {
    for (const double max_norm : {0.5, 1e30}) {
      DeviceRow row(Dtype::kF32, count, random() % 16, stream);
      fill_finite(row, random);
      std::vector<double> squares(5);
      double sum = 0.0;
      for (double& square : squares) sum += square = static_cast<double>(random()) * 1e-3;
      const Buffer words(stream.device(), 8 * sizeof(double));
      auto* const on_device = reinterpret_cast<double*>(words.data());
      copy_bytes(on_device, squares.data(), 5 * sizeof(double), stream);
      kernels::sum_in_order(on_device, 5, on_device + 5, stream);
      double* const factor = on_device + 7;
      kernels::clip_factor({on_device, 5, max_norm, 1e-6, on_device + 6, factor}, stream);
      std::array<double, 2> got{};
      copy_bytes(got.data(), on_device + 5, sizeof(got), stream);
      Stream(stream).synchronize();
      if (got[0] != sum || got[1] != std::sqrt(sum)) return "the sum or its root is another";
      const double clip = max_norm / (std::sqrt(sum) + 1e-6);
      const float by = clip < 1.0 ? static_cast<float>(clip) : 1.0F;
      const std::string wrong = check_product(row, by, factor, stream);
      if (!wrong.empty()) return wrong;
    }
  }
  return {};
}

std::string check_digests(std::int64_t largest, const Stream& stream) {
  std::mt19937 random(3);
  for (const Dtype dtype : kGradientDtypes) {
    for (const std::int64_t count :
         std::vector<std::int64_t>{0, 1, 3, 4, 5, 2047, 50001, largest}) {
      DeviceRow row(dtype, count, random() % 16, stream);
      row.fill(random);
      const Buffer sum(stream.device(), sizeof(std::uint64_t), Buffer::Place::kPinnedHost);
      auto* const word = reinterpret_cast<std::uint64_t*>(sum.data());
      *word = 5;
      kernels::add_digest(row.view(), 9, word, stream);
      Stream(stream).synchronize();
      if (*word == 5 + kernels::digest(row.host_view(), 9)) continue;
      return "digest of " + std::to_string(count) + " " + std::string(name(dtype));
    }
  }
  return {};
}

std::string check_indicate(const Stream& stream) {
  for (const std::uint32_t word : {0U, 1U, 0x80000000U, 0x3f800000U, 0x40400000U}) {
    const Buffer memory(stream.device(), sizeof(float));
    auto* const out = reinterpret_cast<float*>(memory.data());
    copy_bytes(out, &word, sizeof(word), stream);
    kernels::indicate(out, out, stream);
    float got = -1.0F;
    copy_bytes(&got, out, sizeof(got), stream);
    Stream(stream).synchronize();
    if (got != ((word & 0x7fffffffU) != 0 ? 1.0F : 0.0F)) return "word " + std::to_string(word);
  }
  return {};
}

// poison() must write every element or none, and nothing outside.
std::string check_poison(const Stream& stream) {
  const Flag word = make_flag(stream.device());
  for (const std::uint32_t poisoned : {0U, 1U}) {
    for (const std::int64_t count : {1, 31, 100'003}) {
      *word = poisoned;
      const Flag nonfinite = make_flag(stream.device());
      std::vector<float> values(static_cast<std::size_t>(count) + 2, 1.0F);
      const Buffer memory(stream.device(), values.size() * sizeof(float));
      const TensorView all = memory.view(Dtype::kF32);
      copy_bytes(all.data, values.data(), all.size_in_bytes(), stream);
      kernels::poison(*word, all.slice(1, count), nonfinite.get(), stream);
      copy_bytes(values.data(), all.data, all.size_in_bytes(), stream);
      Stream(stream).synchronize();
      if (*nonfinite != poisoned) return "the flag is " + std::to_string(*nonfinite);
      for (std::int64_t i = 0; i < count + 2; ++i) {
        const float value = values[static_cast<std::size_t>(i)];
        const bool inside = i >= 1 && i <= count;
        const bool is_right = poisoned != 0 && inside ? std::isnan(value) : value == 1.0F;
        if (!is_right) return "element " + std::to_string(i) + " of " + std::to_string(count);
      }
    }
  }
  return {};
}

}  // namespace

std::vector<Check> norm_checks(Effort effort) {
  const std::int64_t largest = effort == Effort::kFull ? 40'000'007 : 1'200'007;
  return {
      {"squared norm: the bits of the host",
       [largest](const Stream& stream) { return check_norms(largest, stream); }},
      {"non-finite elements are found anywhere", check_nonfinite},
      {"clipping: the bits of the host", check_clip},
      {"digests: the bits of the host",
       [largest](const Stream& stream) { return check_digests(largest, stream); }},
      {"flags as numbers", check_indicate},
      {"poison", check_poison},
  };
}

}  // namespace hsdp::gpu
