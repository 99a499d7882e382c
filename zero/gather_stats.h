// What a gather of parameters has done so far.
#pragma once

#include <cstdint>

namespace hsdp::zero {

struct GatherStats {
  std::int64_t gather_count = 0;  // all-gathers: none in a group of one
  std::int64_t bytes = 0;         // of whole arrays, gathered
  double exposed_s = 0;           // for which wait() has held up the host
};

}  // namespace hsdp::zero
