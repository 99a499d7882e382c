// What the hops do to a bucket's numbers: factors, exponents and additions, computed at run time.
//
// Pure functions, shared by the Reducer, snapshots and tests. They alone decide what is divided,
// scaled or added [Note: one place that divides]; rules 1, 2, 3 and 6 of docs/design.md.
#pragma once

#include <cstdint>
#include <optional>

#include "hsdp/dtype.h"

namespace hsdp {

// S after only a reduce-scatter, S * R after both hops (a group of one contributes 1), times the
// number of microbatches to average over. `explicit_factor` (set_gradient_divide_factor) overrides
// it for partials and results.
[[nodiscard]] double gradient_divide_factor(int shard_size, int replicate_size,
                                            bool replica_hop_ran,
                                            std::optional<double> explicit_factor = std::nullopt,
                                            std::int64_t microbatches = 1);

// If ranks count tokens or batches: the total count over the microbatches that are summed rather
// than averaged. 1 if nothing was counted: then the sum is zero.
[[nodiscard]] double counted_divide_factor(std::int64_t count, std::int64_t summed_microbatches);

// Whether fp32(f * s), by which the last kernel divides, and its reciprocal are normal fp32
// numbers; s is the loss scale. Otherwise all results would be zero or infinite.
[[nodiscard]] bool is_usable_divisor(double divide_factor, double loss_scale);

// ceil(log2(n)) for n >= 1: the exponent that keeps a sum of n f16 values in range.
[[nodiscard]] int headroom_exponent(std::int64_t n);

// A bucket when a microbatch with sync other than `none` sends it. Counts are of microbatches.
struct BucketSums {
  int shard_size = 1;
  int replicate_size = 1;
  Dtype shard_wire = Dtype::kF32;
  Dtype replica_wire = Dtype::kF32;
  std::int64_t local_count = 1;  // in one packed row; 0: nothing is packed
  std::int64_t carry_count = 1;  // in the carry after the shard hop
  bool has_carry = false;        // before this microbatch
  bool has_total = false;        // replica-summed, of an earlier `all` of this step
  bool replicates = false;       // sync is `all`
  bool ends_step = false;
  double divisor = 1.0;  // f s; f32 sums are divided by fp32(f s)
  bool means = false;    // the hop divides each of its totals by this immediately
};

// The replica hop's wire dtype for a bucket: f64 unchanged, otherwise replica_dtype, by default the
// shard hop's wire dtype.
[[nodiscard]] constexpr Dtype replica_wire(Dtype shard_wire, std::optional<Dtype> replica_dtype) {
  return shard_wire == Dtype::kF64 ? shard_wire : replica_dtype.value_or(shard_wire);
}

// The sum over the replicas. An f16 wire carries sum 2^-k and gathers total 2^-K; the exact 2^K is
// folded into the division.
struct HopArithmetic {
  Dtype wire = Dtype::kF32;
  int send_exponent = 0;      // k
  int total_exponent = 0;     // K
  double divisor = 1.0;       // for the total
  double mean_divisor = 1.0;  // f s, even if the division comes later
};

struct BucketArithmetic {
  // The shard hop: carry = (carry +) (sum of the ranks' rows) 2^j / divisor, rows sent times 2^-j.
  bool runs_shard_hop = false;
  int row_exponent = 0;  // j
  bool adds_carry = false;
  double shard_divisor = 1.0;
  // The replica hop, on the carry.
  bool runs_replica_hop = false;
  HopArithmetic replica;
  // After the hops. kDivide: carry = carry / divisor. kKeepTotal: total = (carry) (+ total).
  // kJoinTotal: carry = ((carry) + total) / divisor.
  enum class Rest : std::uint8_t { kNothing, kDivide, kKeepTotal, kJoinTotal };
  Rest rest = Rest::kNothing;
  bool rest_reads_carry = false;
  bool rest_reads_total = false;
  double rest_divisor = 1.0;

  [[nodiscard]] bool ends_after_shard_hop() const {
    return !runs_replica_hop && rest == Rest::kNothing;
  }
};
[[nodiscard]] BucketArithmetic hop_arithmetic(const BucketSums& sums);

}  // namespace hsdp
