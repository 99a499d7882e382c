// Makes a WaitTable from the records of all ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "hsdp/comm/operation_record.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/wait_table.h"

namespace hsdp::reducer {

constexpr int kUnknownRank = -1;  // in place of an awaited rank

struct RankWait {
  int awaited = 0;  // or kUnknownRank
  std::int64_t from_ns = 0;
  std::int64_t to_ns = 0;
};
using WaitShares = std::map<std::pair<int, int>, std::int64_t>;  // by waiting and awaited rank

// Nanoseconds of `waits`, which are by waiting rank. An awaited rank may have been late because it
// had waited itself: that part of a wait counts for the rank that it had waited for.
[[nodiscard]] WaitShares share_waits(std::map<int, std::vector<RankWait>> waits,
                                     std::int64_t error_ns);

// Collective over the mesh; the same table on every rank. `now_s`: the clock of the record's times.
[[nodiscard]] WaitTable compare_waits(Groups& groups,
                                      const std::function<double()>& now_s = Operations::now_s);

}  // namespace hsdp::reducer
