// Through whom each rank speaks to rank 0.
//
// Up to kFanOut others speak to it themselves. Where there are more, the lowest rank of each host
// does, and the others of a host speak through ranks of their own host, at most kFanOut through
// each. Pure: all ranks come to the same tree.
#pragma once

#include <string>
#include <vector>

namespace hsdp::comm {

class ControlTree {
 public:
  static constexpr int kFanOut = 16;

  ControlTree() = default;
  explicit ControlTree(const std::vector<std::string>& hosts, int fan_out = kFanOut);

  // Of rank 0: -1. Lower than the rank.
  [[nodiscard]] int parent(int rank) const { return parents_[static_cast<std::size_t>(rank)]; }
  // This rank can reach rank 0 only by itself.
  void cut(int rank) { parents_[static_cast<std::size_t>(rank)] = 0; }
  [[nodiscard]] std::vector<int> children(int rank) const;
  // Who speaks through it, itself left out. Ascending.
  [[nodiscard]] std::vector<int> below(int rank) const;
  // Everybody speaks to rank 0 itself.
  [[nodiscard]] bool is_flat() const;
  [[nodiscard]] int size() const { return static_cast<int>(parents_.size()); }

 private:
  std::vector<int> parents_;
};

}  // namespace hsdp::comm
