#include "hsdp/kernels/simd_target.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "hsdp/error.h"

namespace hsdp::kernels {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

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

// A process reads the variable once, so this runs in a child process.
TEST(SimdTargetDeathTest, IsReadOnceFromTheEnvironmentAndMustBeKnown) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto read = [] {
    setenv("HSDP_KERNELS", "avx1024", 1);
    EXPECT_THAT([] { static_cast<void>(simd_target()); },
                ThrowsMessage<UsageError>(
                    AllOf(HasSubstr("HSDP_KERNELS"), HasSubstr("avx1024"), HasSubstr("scalar"))));
    setenv("HSDP_KERNELS", "scalar", 1);
    EXPECT_EQ(simd_target(), "scalar");
    setenv("HSDP_KERNELS", simd_targets().front().c_str(), 1);
    EXPECT_EQ(simd_target(), "scalar");
    std::exit(::testing::Test::HasFailure() ? 1 : 0);
  };
  EXPECT_EXIT(read(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace hsdp::kernels
