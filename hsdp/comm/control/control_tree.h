// Which rank each rank speaks through to reach rank 0.
//
// Up to kFanOut other ranks speak to rank 0 directly. With more, only the lowest rank of each host
// does; the others speak through ranks of their host, at most kFanOut through each. A pure
// function: all ranks compute the same tree.
#pragma once

#include <string>
#include <vector>

namespace hsdp::comm {

class ControlTree {
 public:
  static constexpr int kFanOut = 16;

  ControlTree() = default;
  explicit ControlTree(const std::vector<std::string>& hosts, int fan_out = kFanOut);

  // -1 for rank 0; otherwise lower than `rank`.
  [[nodiscard]] int parent(int rank) const { return parents_[static_cast<std::size_t>(rank)]; }
  // `rank` can reach rank 0 only directly.
  void cut(int rank) { parents_[static_cast<std::size_t>(rank)] = 0; }
  [[nodiscard]] std::vector<int> children(int rank) const;
  // The ranks that speak through `rank`, ascending, without itself.
  [[nodiscard]] std::vector<int> below(int rank) const;
  // Whether every rank speaks to rank 0 directly.
  [[nodiscard]] bool is_flat() const;
  [[nodiscard]] int size() const { return static_cast<int>(parents_.size()); }

 private:
  std::vector<int> parents_;
};

}  // namespace hsdp::comm
