// MASTER_ADDR and MASTER_PORT in the environment: where the ranks' torch.distributed meets.
#pragma once

namespace hsdp::tools {

// Sets both, with a port that is free now, unless either is already set. Sets neither if no port is
// free: hsdp itself does not need them.
void offer_master_address();

}  // namespace hsdp::tools
