#include "hsdp/divide_factors.h"

#include <bit>

namespace hsdp {

double gradient_divide_factor(int shard_size, int replicate_size, bool replica_hop_ran,
                              std::optional<double> explicit_factor) {
  if (explicit_factor) return *explicit_factor;
  return static_cast<double>(shard_size) * (replica_hop_ran ? replicate_size : 1);
}

float fp32_divisor(double divide_factor, double loss_scale) {
  return static_cast<float>(divide_factor * loss_scale);
}

int headroom_exponent(std::int64_t n) {
  return n <= 1 ? 0 : static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n - 1)));
}

}  // namespace hsdp
