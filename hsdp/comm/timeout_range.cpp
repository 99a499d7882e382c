#include "hsdp/comm/timeout_range.h"

#include <array>
#include <cstdio>
#include <string>

#include "hsdp/error.h"

namespace hsdp::comm {

void require_timeout(std::chrono::duration<double> timeout, std::string_view what) {
  if (timeout >= kShortestTimeout && timeout <= kLongestTimeout) return;  // NaN fails both
  std::array<char, 32> got{};
  std::snprintf(got.data(), got.size(), "%g", timeout.count());
  throw UsageError(std::string(what) + ": expected 0.001 to " +
                   std::to_string(kLongestTimeout.count()) + " seconds, got " + got.data());
}

}  // namespace hsdp::comm
