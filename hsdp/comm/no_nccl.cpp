#include "hsdp/comm/optional_engines.h"
#include "hsdp/error.h"

namespace hsdp::comm {

void require_nccl() {
  throw UsageError(
      {.where = "engine: nccl",
       .expected = "a build of hsdp with NCCL",
       .got = "one without",
       .remedy = "configure with -DHSDP_NCCL=ON, or use engine 'host' with host memory"});
}

Communicator nccl_world(const std::shared_ptr<Control>& /*control*/, Device /*device*/) {
  require_nccl();
  return {};
}

}  // namespace hsdp::comm
