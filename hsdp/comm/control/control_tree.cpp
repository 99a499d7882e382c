#include "hsdp/comm/control/control_tree.h"

#include <algorithm>
#include <map>

namespace hsdp::comm {

ControlTree::ControlTree(const std::vector<std::string>& hosts, int fan_out)
    : parents_(hosts.size(), 0) {
  parents_.front() = -1;
  if (std::ssize(hosts) - 1 <= fan_out) return;
  std::map<std::string, std::vector<int>> ranks_of;
  for (int rank = 0; rank < size(); ++rank) {
    std::vector<int>& on_host = ranks_of[hosts[static_cast<std::size_t>(rank)]];
    if (!on_host.empty()) {
      const auto place = (on_host.size() - 1) / static_cast<std::size_t>(fan_out);
      parents_[static_cast<std::size_t>(rank)] = on_host[place];
    }
    on_host.push_back(rank);
  }
}

std::vector<int> ControlTree::children(int rank) const {
  std::vector<int> ranks;
  for (int other = 0; other < size(); ++other) {
    if (parent(other) == rank) ranks.push_back(other);
  }
  return ranks;
}

std::vector<int> ControlTree::below(int rank) const {
  std::vector<bool> is_below(parents_.size());
  std::vector<int> ranks;
  for (int other = rank + 1; other < size(); ++other) {  // parents are lower
    const int above = parent(other);
    if (above != rank && !is_below[static_cast<std::size_t>(above)]) continue;
    is_below[static_cast<std::size_t>(other)] = true;
    ranks.push_back(other);
  }
  return ranks;
}

bool ControlTree::is_flat() const {
  return std::ranges::all_of(parents_, [](int parent) { return parent <= 0; });
}

}  // namespace hsdp::comm
