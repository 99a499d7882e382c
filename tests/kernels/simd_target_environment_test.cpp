#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "hsdp/error.h"
#include "hsdp/kernels/simd_target.h"

namespace hsdp::kernels {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(SimdTargetEnvironment, IsReadOnceAndMustBeKnown) {
  setenv("HSDP_KERNELS", "avx1024", 1);
  EXPECT_THAT([] { static_cast<void>(simd_target()); },
              ThrowsMessage<UsageError>(
                  AllOf(HasSubstr("HSDP_KERNELS"), HasSubstr("avx1024"), HasSubstr("scalar"))));
  setenv("HSDP_KERNELS", "scalar", 1);
  EXPECT_EQ(simd_target(), "scalar");
  setenv("HSDP_KERNELS", simd_targets().front().c_str(), 1);
  EXPECT_EQ(simd_target(), "scalar");
}

}  // namespace
}  // namespace hsdp::kernels
