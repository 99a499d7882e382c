#include "tests/support/error_bound.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace hsdp::test {
namespace {

constexpr double kF32Unit = 0x1p-24;

double unit_of(Dtype dtype) {
  return dtype == Dtype::kBf16 ? 0x1p-8 : dtype == Dtype::kF16 ? 0x1p-11 : 0.0;
}

// Half the spacing of f16 subnormals in a value sent times 2^-exponent.
double half_quantum(Dtype dtype, int exponent) {
  return dtype == Dtype::kF16 ? std::ldexp(1.0, exponent - 25) : 0.0;
}

// What the shard hop's packs may lose below f16's normal range, over all ranks and microbatches.
double packed_quanta(const ReferenceStep& step) {
  double sum = 0.0;
  int local_count = 0;
  const auto pack = [&](int count) {
    sum += step.replicate * step.shard * half_quantum(step.reduce_dtype, power_of_two_above(count));
    local_count = 0;
  };
  for (const Sync sync : step.schedule) {
    if (sync == Sync::kNone) {
      ++local_count;
    } else {
      pack(local_count + 1);
    }
  }
  if (step.finish && local_count > 0) pack(local_count);
  return step.shard > 1 ? sum : 0.0;
}

struct Sums {
  double magnitude = 0.0;          // sum |g|
  std::vector<double> shard_sums;  // per replica
  double total = 0.0;
};

Sums sums_of(const ReferenceStep& step, const Gradients& gradients, std::size_t element) {
  Sums sums;
  sums.shard_sums.resize(static_cast<std::size_t>(step.replicate));
  for (const auto& microbatch : gradients) {
    for (std::size_t rank = 0; rank < microbatch.size(); ++rank) {
      if (!microbatch[rank]) continue;
      const double g = (*microbatch[rank])[element];
      sums.magnitude += std::abs(g);
      sums.shard_sums[rank / static_cast<std::size_t>(step.shard)] += g;
      sums.total += g;
    }
  }
  return sums;
}

double error_before_division(const ReferenceStep& step, const Sums& sums, double quanta) {
  const int microbatch_count = static_cast<int>(step.schedule.size());
  const int world = step.replicate * step.shard;
  const double shard_unit = step.shard > 1 ? unit_of(step.reduce_dtype) : 0.0;
  const double packed = shard_unit * sums.magnitude + quanta;
  // One fp32 rounding for each addition that an element's value passes through.
  const double additions = microbatch_count * world;
  const double error =
      packed + additions * kF32Unit * (sums.magnitude + packed) * (1.0 + additions * kF32Unit);
  if (step.replicate == 1 || step.replica_dtype == Dtype::kF32) return error;
  const double unit = unit_of(step.replica_dtype);
  const int k = power_of_two_above(step.shard * microbatch_count);
  const int total_k = power_of_two_above(world * microbatch_count);
  double magnitude_of_shard_sums = error;
  for (const double sum : sums.shard_sums) magnitude_of_shard_sums += std::abs(sum);
  const double sent =
      error + unit * magnitude_of_shard_sums + step.replicate * half_quantum(step.replica_dtype, k);
  return sent + unit * (std::abs(sums.total) + sent) + half_quantum(step.replica_dtype, total_k);
}

}  // namespace

BoundedMean bounded_mean(const ReferenceStep& step, const Gradients& gradients) {
  const std::size_t count = gradients[0][0]->size();
  const double quanta = packed_quanta(step);
  const double divisor = step.divide_factor.value_or(step.replicate * step.shard) * step.loss_scale;
  BoundedMean mean;
  for (std::size_t i = 0; i < count; ++i) {
    const Sums sums = sums_of(step, gradients, i);
    const double error = error_before_division(step, sums, quanta);
    mean.value.push_back(sums.total / divisor);
    // fp32(divisor), the division, and a result that is subnormal in fp32.
    mean.bound.push_back(error / divisor * (1.0 + 4.0 * kF32Unit) +
                         2.0 * kF32Unit * std::abs(sums.total / divisor) + 0x1p-149);
  }
  return mean;
}

double worst_error_ratio(const BoundedMean& mean, const Values& result) {
  if (result.size() != mean.value.size()) return std::numeric_limits<double>::infinity();
  double worst = 0.0;
  for (std::size_t i = 0; i < result.size(); ++i) {
    const double ratio = std::abs(static_cast<double>(result[i]) - mean.value[i]) / mean.bound[i];
    if (std::isnan(ratio)) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, ratio);
  }
  return worst;
}

}  // namespace hsdp::test
