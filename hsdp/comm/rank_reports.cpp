#include "hsdp/comm/rank_reports.h"

#include <algorithm>
#include <array>
#include <chrono>

#include "hsdp/comm/engine.h"

namespace hsdp::comm {
namespace {

// Without a timeout of its own. The wait ends: each turn before it has the world's timeout.
void wait_for_turns(Control& control, const std::string& key, std::span<const int> members,
                    std::string_view act) {
  const std::chrono::milliseconds time =
      std::min(std::chrono::milliseconds(100), control.timeout() / 2);
  control.post(key, members, {});
  while (!control.collect_within(key, members, {.operation = act}, time)) {
  }
}

}  // namespace

void report_to_first(Communicator& group, const std::string& key,
                     const std::function<bool(Saying& part)>& next, std::string_view act,
                     const TakeReport& take) {
  Control& control = group.engine()->control();
  const int first = group.world_rank(0);
  const bool is_first = group.rank() == 0;
  for (bool goes_on = is_first; goes_on;) {
    Saying part;
    goes_on = next(part);
    Agreement own;
    own.add(first, part);
    take(0, own);
  }
  for (int rank = 1; rank < group.size(); ++rank) {
    if (!is_first && rank != group.rank()) continue;
    std::array<int, 2> pair{first, group.world_rank(rank)};
    std::ranges::sort(pair);
    const std::string turn = key + "/turn";
    if (is_first) {
      control.post(turn, pair, {});
      static_cast<void>(control.collect(turn, pair, {.operation = act}));
    } else {
      wait_for_turns(control, turn, pair, act);
    }
    bool goes_on = true;
    for (int i = 0; goes_on; ++i) {
      const std::string name = key + "/part/" + std::to_string(i);
      Saying part;
      if (!is_first && !next(part)) part.equal = {"last"};
      control.post(name, pair, part);
      const Agreement said = control.collect(name, pair, {.operation = act});
      if (is_first) take(rank, said);
      goes_on = said.places.empty();
    }
  }
  std::vector<int> all = group.world_ranks();
  std::ranges::sort(all);
  wait_for_turns(control, key + "/taken", all, act);
}

void report_to_first(Communicator& group, const std::string& key, const Saying& report,
                     std::string_view act, const TakeReport& take) {
  const auto next = [&](Saying& part) {
    part = report;
    return false;
  };
  report_to_first(group, key, next, act, take);
}

}  // namespace hsdp::comm
