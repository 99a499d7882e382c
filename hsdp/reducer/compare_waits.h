// Makes a WaitTable from the records of all ranks.
#pragma once

#include "hsdp/reducer/groups.h"
#include "hsdp/wait_table.h"

namespace hsdp::reducer {

// Collective over the mesh; the same table on every rank.
[[nodiscard]] WaitTable compare_waits(Groups& groups);

}  // namespace hsdp::reducer
