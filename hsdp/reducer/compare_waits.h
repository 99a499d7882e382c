// Makes a WaitTable from the records of all ranks.
#pragma once

#include <functional>

#include "hsdp/comm/operation_record.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/wait_table.h"

namespace hsdp::reducer {

// Collective over the mesh; the same table on every rank. `now_s`: the clock of the record's times.
[[nodiscard]] WaitTable compare_waits(Groups& groups,
                                      const std::function<double()>& now_s = Operations::now_s);

}  // namespace hsdp::reducer
