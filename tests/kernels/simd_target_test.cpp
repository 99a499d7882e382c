#include "hsdp/kernels/simd_target.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hsdp/error.h"

namespace hsdp::kernels {
namespace {

TEST(SimdTarget, ListsTheBestFirstAndScalarLast) {
  const std::vector<std::string> targets = simd_targets();
  ASSERT_FALSE(targets.empty());
  EXPECT_EQ(targets.back(), "scalar");
#if defined(__x86_64__)
  const auto has = [&](const char* name) {
    return ::testing::Value(targets, ::testing::Contains(name));
  };
  EXPECT_EQ(has("avx2"), __builtin_cpu_supports("avx2") != 0);
  EXPECT_EQ(has("avx512"), __builtin_cpu_supports("avx512bw") != 0);
#endif
}

TEST(SimdTarget, IsTheOneThatWasForced) {
  const std::string before = simd_target();
  for (const std::string& target : simd_targets()) {
    force_simd_target(target);
    EXPECT_EQ(simd_target(), target);
  }
  EXPECT_THROW(force_simd_target("mmx"), UsageError);
  EXPECT_EQ(simd_target(), "scalar");
  force_simd_target(before);
}

}  // namespace
}  // namespace hsdp::kernels
