// Where torch.distributed of the ranks meets: MASTER_ADDR and MASTER_PORT in the environment.
#pragma once

namespace hsdp::tools {

// Sets both to a port that is free now, unless somebody has set one of them. Leaves them out when
// there is no such port: hsdp itself needs neither.
void offer_master_address();

}  // namespace hsdp::tools
