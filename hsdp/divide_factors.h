// The divide factor of a result, computed at run time from the hops that ran.
//
// A pure function: the Reducer, snapshots and tests call the same one. Rule 1 of docs/design.md.
#pragma once

#include <cstdint>
#include <optional>

namespace hsdp {

// S after a reduce-scatter alone, S * R after both hops; a group of one contributes 1.
// `explicit_factor` (set_gradient_divide_factor) overrides it for partials and results alike.
[[nodiscard]] double gradient_divide_factor(int shard_size, int replicate_size,
                                            bool replica_hop_ran,
                                            std::optional<double> explicit_factor = std::nullopt);

// fp32(f * s): what the last kernel divides by, s the loss scale.
[[nodiscard]] float fp32_divisor(double divide_factor, double loss_scale);

// ceil(log2(n)) for n >= 1: the exponent that keeps a sum of n f16 values in range.
[[nodiscard]] int headroom_exponent(std::int64_t n);

}  // namespace hsdp
