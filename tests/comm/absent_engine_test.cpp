// Engines that this build lacks: HSDP_ABSENT_ENGINES, separated by blanks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "hsdp/comm/world.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

std::string usage_error_of(const WorldOptions& options) {
  try {
    static_cast<void>(connect_world(options));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(AbsentEngine, NamesItsOption) {
  std::istringstream absent(HSDP_ABSENT_ENGINES);
  std::string engine;
  while (absent >> engine) {
    WorldOptions options;
    options.engine = engine;
    const std::string option = "-DHSDP_" + std::string(engine == "mpi" ? "MPI" : "NCCL") + "=ON";
    EXPECT_THAT(usage_error_of(options), testing::HasSubstr(option));
    if (engine != "nccl") continue;
    options.engine = "auto";
    options.device.type = DeviceType::kCuda;
    EXPECT_THAT(usage_error_of(options), testing::HasSubstr(option));
  }
}

}  // namespace
}  // namespace hsdp
