// What a gather of parameters has done so far.
#pragma once

#include <cstdint>

namespace hsdp::zero {

struct GatherStats {
  std::int64_t gather_count = 0;  // all-gathers; 0 in a group of one
  std::int64_t bytes = 0;         // of gathered arrays
  double exposed_s = 0;           // time for which wait() has blocked the host
};

}  // namespace hsdp::zero
