#include "hsdp/divide_factors.h"

#include <bit>
#include <cmath>

namespace hsdp {

double gradient_divide_factor(int shard_size, int replicate_size, bool replica_hop_ran,
                              std::optional<double> explicit_factor, std::int64_t microbatches) {
  if (explicit_factor) return *explicit_factor;
  return static_cast<double>(shard_size) * (replica_hop_ran ? replicate_size : 1) *
         static_cast<double>(microbatches);
}

double counted_divide_factor(std::int64_t count, std::int64_t summed_microbatches) {
  if (count == 0) return 1.0;
  return static_cast<double>(count) / static_cast<double>(summed_microbatches);
}

bool is_usable_divisor(double divide_factor, double loss_scale) {
  const auto divisor = static_cast<float>(divide_factor * loss_scale);
  return std::isnormal(divisor) && std::isnormal(1.0F / divisor);
}

int headroom_exponent(std::int64_t n) {
  return n <= 1 ? 0 : static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n - 1)));
}

BucketArithmetic hop_arithmetic(const BucketSums& sums) {
  using Rest = BucketArithmetic::Rest;
  BucketArithmetic result;
  result.runs_shard_hop = sums.local_count > 0 && sums.shard_size > 1;
  result.row_exponent = sums.shard_wire == Dtype::kF16 ? headroom_exponent(sums.local_count) : 0;
  result.adds_carry = sums.has_carry;
  if (!sums.replicates) return result;

  const bool carries = sums.carry_count > 0;
  // If there is a total of earlier microbatches, divide only after adding it.
  const bool divides_sum = sums.ends_step && !sums.has_total;
  const bool means = sums.means && sums.replicate_size > 1;
  result.runs_replica_hop = carries && sums.replicate_size > 1;
  if (result.runs_replica_hop) {
    result.replica.mean_divisor = sums.divisor;
    result.replica.wire = sums.replica_wire;
    if (sums.replica_wire == Dtype::kF16) {
      const std::int64_t summed = sums.shard_size * sums.carry_count;
      result.replica.send_exponent = headroom_exponent(summed);
      result.replica.total_exponent = headroom_exponent(summed * sums.replicate_size);
    }
    if (divides_sum || means) result.replica.divisor = sums.divisor;
  } else if (divides_sum && result.runs_shard_hop) {
    result.shard_divisor = sums.divisor;
  } else if (divides_sum && carries) {
    result.rest = Rest::kDivide;
  }
  if (!divides_sum) result.rest = sums.ends_step ? Rest::kJoinTotal : Rest::kKeepTotal;
  result.rest_reads_carry = carries;
  result.rest_reads_total = sums.has_total;
  if (sums.ends_step && !means) result.rest_divisor = sums.divisor;
  return result;
}

}  // namespace hsdp
