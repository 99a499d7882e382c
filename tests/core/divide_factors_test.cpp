#include "hsdp/divide_factors.h"

#include <gtest/gtest.h>

namespace hsdp {
namespace {

TEST(DivideFactors, AreTheProductOfTheHopsThatRan) {
  EXPECT_EQ(gradient_divide_factor(8, 4, false), 8.0);
  EXPECT_EQ(gradient_divide_factor(8, 4, true), 32.0);
  EXPECT_EQ(gradient_divide_factor(1, 4, false), 1.0);
  EXPECT_EQ(gradient_divide_factor(1, 4, true), 4.0);
  EXPECT_EQ(gradient_divide_factor(7, 1, true), 7.0);
  EXPECT_EQ(gradient_divide_factor(1, 1, true), 1.0);
}

TEST(DivideFactors, GiveWayToAnExplicitOne) {
  EXPECT_EQ(gradient_divide_factor(8, 4, false, 3.5), 3.5);
  EXPECT_EQ(gradient_divide_factor(8, 4, true, 1.0), 1.0);
}

TEST(HeadroomExponent, IsTheLogarithmRoundedUp) {
  for (std::int64_t n = 1; n <= 70000; ++n) {
    const int exponent = headroom_exponent(n);
    ASSERT_GE(std::int64_t{1} << exponent, n);
    ASSERT_TRUE(exponent == 0 || (std::int64_t{1} << (exponent - 1)) < n) << n;
  }
  EXPECT_EQ(headroom_exponent((std::int64_t{1} << 40) + 1), 41);
}

// One element of a bucket before the hops; all ranks and replicas have the same values.
struct Element {
  double row = 3;  // the value of each rank
  double carry = 5;
  double total = 7;
};

struct After {
  double carry = 0;
  double total = 0;
  int divisions = 0;
};

After after_hops(const BucketSums& sums, const Element& element) {
  using Rest = BucketArithmetic::Rest;
  const BucketArithmetic arithmetic = hop_arithmetic(sums);
  After after{element.carry, element.total, 0};
  const auto divide = [&after](double value, double divisor) {
    after.divisions += divisor == 1.0 ? 0 : 1;
    return value / divisor;
  };
  if (sums.local_count > 0) {
    EXPECT_EQ(arithmetic.runs_shard_hop, sums.shard_size > 1);
    after.carry = (arithmetic.adds_carry ? after.carry : 0) + sums.shard_size * element.row;
    if (arithmetic.runs_shard_hop) after.carry = divide(after.carry, arithmetic.shard_divisor);
  }
  if (arithmetic.runs_replica_hop) {
    after.carry = divide(after.carry * sums.replicate_size, arithmetic.replica.divisor);
  }
  const double sum = (arithmetic.rest_reads_carry ? after.carry : 0) +
                     (arithmetic.rest_reads_total ? after.total : 0);
  if (arithmetic.rest == Rest::kDivide) after.carry = divide(after.carry, arithmetic.rest_divisor);
  if (arithmetic.rest == Rest::kKeepTotal) after.total = divide(sum, arithmetic.rest_divisor);
  if (arithmetic.rest == Rest::kJoinTotal) after.carry = divide(sum, arithmetic.rest_divisor);
  return after;
}

template <typename Check>
void each_case(Check check) {
  for (const int shard_size : {1, 2, 4}) {
    for (const int replicate_size : {1, 2, 3}) {
      for (const std::int64_t local_count : {0, 1, 3}) {
        for (int flags = 0; flags < 16; ++flags) {
          BucketSums sums{.shard_size = shard_size,
                          .replicate_size = replicate_size,
                          .local_count = local_count,
                          .has_carry = (flags & 1) != 0,
                          .has_total = (flags & 2) != 0,
                          .replicates = (flags & 4) != 0,
                          .ends_step = (flags & 12) == 12,
                          .divisor = 8.0F};
          sums.carry_count = local_count + (sums.has_carry ? 2 : 0);
          if (sums.carry_count > 0 || sums.has_total) check(sums);
        }
      }
    }
  }
}

TEST(HopArithmetic, AddsEverythingOnceAndDividesOnce) {
  each_case([](const BucketSums& sums) {
    const Element element;
    const After after = after_hops(sums, element);
    const double shard_sum = (sums.has_carry ? element.carry : 0) +
                             (sums.local_count > 0 ? sums.shard_size * element.row : 0);
    const double whole = shard_sum * sums.replicate_size + (sums.has_total ? element.total : 0);
    EXPECT_EQ(after.divisions, sums.ends_step ? 1 : 0);
    if (!sums.replicates) {
      EXPECT_EQ(after.carry, sums.carry_count > 0 ? shard_sum : element.carry);
    } else if (sums.ends_step) {
      EXPECT_EQ(after.carry, whole / 8);
    } else {
      EXPECT_EQ(after.total, whole);
    }
  });
}

// A hop that returns means has divided its totals; they are added and not divided again.
TEST(HopArithmetic, AddsMeansAndDividesNoneOfThem) {
  each_case([](BucketSums sums) {
    sums.means = true;
    const BucketArithmetic result = hop_arithmetic(sums);
    const BucketArithmetic plain = [&sums] {
      sums.means = false;
      return hop_arithmetic(sums);
    }();
    EXPECT_EQ(result.replica.mean_divisor, result.runs_replica_hop ? 8 : 1);
    EXPECT_EQ(plain.replica.mean_divisor, result.replica.mean_divisor);
    if (sums.replicate_size == 1) {
      EXPECT_EQ(result.rest_divisor, plain.rest_divisor);
      EXPECT_EQ(result.shard_divisor, plain.shard_divisor);
      return;
    }
    EXPECT_EQ(result.rest, plain.rest);
    EXPECT_EQ(result.rest_divisor, 1);
    EXPECT_EQ(result.shard_divisor, 1);
    EXPECT_EQ(result.replica.divisor, result.runs_replica_hop ? 8 : 1);
  });
}

TEST(HopArithmetic, OnlyF16TravelsScaled) {
  each_case([](BucketSums sums) {
    for (const Dtype shard_wire : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const Dtype replica_wire : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
        sums.shard_wire = shard_wire;
        sums.replica_wire = replica_wire;
        const BucketArithmetic result = hop_arithmetic(sums);
        const bool rows = shard_wire == Dtype::kF16;
        EXPECT_EQ(result.row_exponent, rows ? headroom_exponent(sums.local_count) : 0);
        if (!result.runs_replica_hop) continue;
        EXPECT_EQ(result.replica.wire, replica_wire);
        const bool scaled = replica_wire == Dtype::kF16;
        const std::int64_t summed = sums.shard_size * sums.carry_count;
        EXPECT_EQ(result.replica.send_exponent, scaled ? headroom_exponent(summed) : 0);
        EXPECT_EQ(result.replica.total_exponent,
                  scaled ? headroom_exponent(summed * sums.replicate_size) : 0);
      }
    }
  });
}

}  // namespace
}  // namespace hsdp
