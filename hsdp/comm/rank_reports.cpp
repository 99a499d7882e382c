#include "hsdp/comm/rank_reports.h"

#include <algorithm>
#include <array>

#include "hsdp/comm/engine.h"

namespace hsdp::comm {

void report_to_first(Communicator& group, const std::string& key, const Saying& report,
                     std::string_view act,
                     const std::function<void(int rank, const Agreement& report)>& take) {
  Control& control = group.engine()->control();
  const bool is_first = group.rank() == 0;
  if (is_first) {
    Agreement own;
    own.add(group.world_rank(0), report);
    take(0, own);
  }
  for (int rank = 1; rank < group.size(); ++rank) {
    if (!is_first && rank != group.rank()) continue;
    std::array<int, 2> pair{group.world_rank(0), group.world_rank(rank)};
    std::ranges::sort(pair);
    const auto exchange = [&](const std::string& name, const Saying& saying) {
      control.post(name, pair, saying);
      return control.collect(name, pair, {.operation = act});
    };
    static_cast<void>(exchange(key + "/turn", {}));
    const Agreement theirs = exchange(key + "/report", is_first ? Saying{} : report);
    if (is_first) take(rank, theirs);
  }
}

}  // namespace hsdp::comm
