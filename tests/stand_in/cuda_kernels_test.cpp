// The checks that a GPU runs, on the stand-in for the CUDA runtime: the same kernels and streams,
// computed by the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>

#include "check.h"

namespace hsdp::gpu {

void PrintTo(const Check& check, std::ostream* out) { *out << check.name; }

namespace {

class OnStandIn : public ::testing::TestWithParam<Check> {};

TEST_P(OnStandIn, Holds) {
  EXPECT_EQ(GetParam().run(Stream::create({DeviceType::kCuda, 0}, "check")), "");
}

std::string name_of(const ::testing::TestParamInfo<Check>& test) {
  std::string name = test.param.name;
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Checks, OnStandIn, ::testing::ValuesIn(all_checks(Effort::kQuick)),
                         name_of);

}  // namespace
}  // namespace hsdp::gpu
