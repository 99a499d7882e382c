#include "hsdp/reducer/group_launch.h"

#include "hsdp/divide_factors.h"

namespace hsdp::reducer {

int GroupLaunch::send_exponent(Dtype wire) const {
  return wire == Dtype::kF16 ? headroom_exponent(local_count) : 0;
}

}  // namespace hsdp::reducer
