// The reference itself, on inputs whose answers are known by hand.
#include "tests/support/numeric_reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "hsdp/dtype.h"
#include "tests/support/gradient_values.h"

namespace hsdp::test {
namespace {

Gradients same_on_every_rank(const std::vector<float>& per_microbatch, int world_size) {
  Gradients gradients;
  for (const float value : per_microbatch) {
    gradients.emplace_back(static_cast<std::size_t>(world_size), Values(3, value));
  }
  return gradients;
}

TEST(RoundTo, AgreesWithTheLibraryOnEverySixteenBitNeighbourhood) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float bf16 = to_float(Bf16{static_cast<std::uint16_t>(bits)});
    const float f16 = to_float(F16{static_cast<std::uint16_t>(bits)});
    for (const float scale : {1.0F, 1.0F + 0x1p-9F, 1.0F + 0x1p-12F, 1.0F - 0x1p-9F, 1.25F}) {
      if (std::isnan(bf16 * scale) || std::isnan(f16 * scale)) continue;
      ASSERT_EQ(round_to(Dtype::kBf16, bf16 * scale), to_float(to_bf16(bf16 * scale)));
      ASSERT_EQ(round_to(Dtype::kF16, f16 * scale), to_float(to_f16(f16 * scale)));
    }
  }
}

TEST(RoundTo, TiesGoToEvenAndOverflowGoesToInfinity) {
  EXPECT_EQ(round_to(Dtype::kBf16, 257.0F), 256.0F);
  EXPECT_EQ(round_to(Dtype::kBf16, 259.0F), 260.0F);
  EXPECT_EQ(round_to(Dtype::kF16, 65519.0F), 65504.0F);
  EXPECT_EQ(round_to(Dtype::kF16, 65520.0F), std::numeric_limits<float>::infinity());
  EXPECT_EQ(round_to(Dtype::kF16, 0x1.8p-24F), 0x1p-23F);
  EXPECT_TRUE(std::signbit(round_to(Dtype::kF16, -0x1p-25F)));
}

TEST(Reference, KeepsTheSmallTermThatASixteenBitCarryLoses) {
  ReferenceStep step{.shard = 2, .schedule = {Sync::kShard, Sync::kShard, Sync::kAll}};
  step.gradient_dtype = step.reduce_dtype = step.replica_dtype = Dtype::kBf16;
  const Gradients gradients = same_on_every_rank({256.0F, 1.0F, -256.0F}, 2);
  EXPECT_EQ(reference_result(step, gradients), Values(3, 1.0F));
}

TEST(Reference, HoldsLocalSumsBeyondTheRangeOfF16) {
  ReferenceStep step{.replicate = 2, .shard = 2, .schedule = {Sync::kNone, Sync::kAll}};
  step.gradient_dtype = step.reduce_dtype = step.replica_dtype = Dtype::kF16;
  const Gradients gradients = same_on_every_rank({40000.0F, 40000.0F}, 4);
  EXPECT_EQ(reference_result(step, gradients), Values(3, 80000.0F));
}

TEST(Reference, DividesByWorldFactorAndLossScale) {
  ReferenceStep step{.replicate = 2, .shard = 3, .schedule = {Sync::kShard, Sync::kAll}};
  const Gradients gradients = same_on_every_rank({2.0F, 3.0F}, 6);
  EXPECT_EQ(reference_result(step, gradients), Values(3, 5.0F));
  step.divide_factor = 10.0;
  step.loss_scale = 2.0;
  EXPECT_EQ(reference_result(step, gradients), Values(3, 1.5F));
  step.schedule = {Sync::kShard, Sync::kShard};
  EXPECT_EQ(reference_partial(step, gradients, 1), Values(3, 15.0F / 20.0F));
}

TEST(Reference, TheWrongOrderDiffersBetweenReplicasAndFromTheMean) {
  const ReferenceStep step{.replicate = 2, .shard = 1, .schedule = {Sync::kShard, Sync::kAll}};
  Gradients gradients = same_on_every_rank({1.0F, 1.0F}, 2);
  gradients[0][1] = Values(3, 5.0F);
  EXPECT_EQ(reference_result(step, gradients), Values(3, 4.0F));
  EXPECT_EQ(accumulate_after_all_reduce(step, gradients, 0), Values(3, 1.5F));
  EXPECT_EQ(accumulate_after_all_reduce(step, gradients, 1), Values(3, 3.5F));
}

}  // namespace
}  // namespace hsdp::test
