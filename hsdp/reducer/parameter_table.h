// The registered parameters of one Reducer, their groups and wire dtypes.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/reducer.h"

namespace hsdp::reducer {

// The remedy for a name that none of them has: suggests a similar name, if there is one.
[[nodiscard]] std::string unknown_name_remedy(std::span<const ParameterSpec> specs,
                                              std::string_view name);

class ParameterTable {
 public:
  // The options outlive it.
  ParameterTable(const ReducerOptions& options, int replicate_size);

  int add(const ParameterSpec& spec);
  // UsageError for an unknown name.
  [[nodiscard]] int find(std::string_view name) const;
  [[nodiscard]] const std::vector<ParameterSpec>& specs() const { return specs_; }
  [[nodiscard]] const ParameterSpec& spec(int parameter) const {
    return specs_[static_cast<std::size_t>(parameter)];
  }
  [[nodiscard]] std::int64_t count(int parameter) const {
    return counts_[static_cast<std::size_t>(parameter)];
  }
  [[nodiscard]] int size() const { return static_cast<int>(specs_.size()); }
  [[nodiscard]] Dtype wire_dtype(int parameter) const;

  void set_units(std::span<const int> units);  // of all parameters, in their order
  // Group 0 is the unnamed one. UsageError for an unknown name.
  [[nodiscard]] int group_of(int parameter) const {
    return group_of_[static_cast<std::size_t>(parameter)];
  }
  [[nodiscard]] int find_group(const std::string& name) const;
  [[nodiscard]] int group_count() const { return static_cast<int>(groups_.size()); }
  [[nodiscard]] const std::string& group_name(int group) const {
    return groups_[static_cast<std::size_t>(group)];
  }

  [[nodiscard]] HopParameter hop_parameter(int parameter) const;
  [[nodiscard]] BucketLayout make_layout(int shard_size) const;
  // The layout before the first step; made again if parameters were added since.
  [[nodiscard]] const BucketLayout& early_layout(int shard_size);
  void forget_layout() { early_layout_.reset(); }
  // One line per parameter, which the ranks compare.
  [[nodiscard]] std::vector<std::string> describe() const;

 private:
  const ReducerOptions& options_;
  bool has_hop_;  // there are several replicas
  std::vector<ParameterSpec> specs_;
  std::vector<std::int64_t> counts_;
  std::vector<int> group_of_;
  std::vector<std::string> groups_;
  std::unordered_map<std::string, int> index_;
  std::optional<BucketLayout> early_layout_;
};

}  // namespace hsdp::reducer
