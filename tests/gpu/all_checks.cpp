#include <algorithm>
#include <iterator>

#include "check.h"

namespace hsdp::gpu {

std::vector<Check> all_checks(Effort effort) {
  std::vector<Check> all = device_checks();
  for (std::vector<Check> part : {pack_checks(effort), sum_checks(effort), norm_checks(effort),
                                  quantize_checks(effort), adamw_checks(effort)}) {
    std::ranges::move(part, std::back_inserter(all));
  }
  return all;
}

}  // namespace hsdp::gpu
