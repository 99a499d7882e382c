#include "hsdp/comm/nccl/nccl_split.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace hsdp::comm {
namespace {

using Members = std::vector<std::pair<int, int>>;  // key, rank

std::map<int, Members> members_by_color(const std::vector<std::string>& messages) {
  std::map<int, Members> groups;
  for (std::size_t r = 0; r < messages.size(); ++r) {
    const std::size_t gap = messages[r].find(' ');
    const int color = std::stoi(messages[r].substr(0, gap));
    if (color < 0) continue;
    groups[color].emplace_back(std::stoi(messages[r].substr(gap + 1)), static_cast<int>(r));
  }
  for (auto& [_, members] : groups) std::ranges::sort(members);
  return groups;
}

}  // namespace

std::unique_ptr<NcclGroup> split_group(NcclGroup& group, int color, int key) {
  group.agree({.operation = Operation::kSplit});
  const auto groups =
      members_by_color(group.exchange("split", std::to_string(color) + " " + std::to_string(key)));
  const bool any_pair =
      std::ranges::any_of(groups, [](const auto& entry) { return entry.second.size() > 1; });
  const auto own = groups.find(color);
  const std::size_t own_size = own == groups.end() ? 0 : own->second.size();
  std::unique_ptr<NcclLink> link;
  if (any_pair) {
    int place = 0;
    if (own_size > 1) {
      const auto same_rank = [&](const auto& member) { return member.second == group.rank(); };
      place = static_cast<int>(std::ranges::find_if(own->second, same_rank) - own->second.begin());
    }
    link = group.link()->split(own_size > 1 ? color : -1, place);
  }
  if (own_size == 0) return nullptr;
  std::vector<int> members;
  for (const auto& [_, r] : own->second) {
    members.push_back(group.members()[static_cast<std::size_t>(r)]);
  }
  std::string id =
      group.id() + "." + std::to_string(group.sequence()) + "c" + std::to_string(color);
  return std::make_unique<NcclGroup>(group.world(), std::move(link), std::move(id),
                                     std::move(members));
}

}  // namespace hsdp::comm
