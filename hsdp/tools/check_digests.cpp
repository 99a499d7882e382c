#include "hsdp/tools/check_digests.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/snapshot/digest_log.h"
#include "hsdp/tools/check_facts.h"
#include "hsdp/tools/text_table.h"

namespace hsdp {
namespace {

void require_alike(const DigestHeader& one, const DigestHeader& other) {
  const auto shape_text = [](const DigestHeader& header) {
    return std::to_string(header.replicate_size) + "x" + std::to_string(header.shard_size);
  };
  if (shape_text(one) != shape_text(other)) {
    throw SnapshotError({.where = "digests",
                         .expected = "runs of one mesh shape",
                         .got = shape_text(one) + " and " + shape_text(other),
                         .remedy = "compare snapshots, which may come from any"});
  }
  if (one == other) return;
  throw SnapshotError({.where = "digests",
                       .expected = "the same Reducer and parameters, cut alike",
                       .got = "others on rank " + std::to_string(one.rank),
                       .remedy = "compare snapshots, which may be cut in any way"});
}

std::vector<DigestComparison::Difference> differences(const std::filesystem::path& a,
                                                      const std::filesystem::path& b,
                                                      std::int64_t step, int rank_count) {
  std::map<std::size_t, DigestComparison::Difference> found;  // by place among the parameters
  for (int rank = 0; rank < rank_count; ++rank) {
    const DigestLog one = read_digests(a, rank, rank_count);
    const std::vector<std::uint64_t> other = read_digests(b, rank, rank_count).steps.at(step);
    for (std::size_t p = 0; p < other.size(); ++p) {
      if (one.steps.at(step).at(p) == other[p]) continue;
      found[p].parameter = one.header.parts[p].name;
      found[p].ranks.push_back(rank);
    }
  }
  std::vector<DigestComparison::Difference> all;
  for (auto& [place, one] : found) all.push_back(std::move(one));
  return all;
}

std::string steps_text(std::int64_t count) {
  return count_text(count) + (count == 1 ? " step" : " steps");
}

}  // namespace

DigestComparison compare_digests(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::map<std::int64_t, bool> steps;  // that all ranks so far have, and whether one differs
  std::optional<int> rank_count;
  for (int rank = 0; rank < rank_count.value_or(1); ++rank) {
    const DigestLog one = read_digests(a, rank, rank_count);
    const DigestLog other = read_digests(b, rank);
    require_alike(one.header, other.header);
    if (!rank_count) {
      rank_count = one.header.replicate_size * one.header.shard_size;
      for (const auto& [step, digests] : one.steps) steps[step] = false;
    }
    for (auto step = steps.begin(); step != steps.end();) {
      const auto here = one.steps.find(step->first);
      const auto there = other.steps.find(step->first);
      if (here == one.steps.end() || there == other.steps.end()) {
        step = steps.erase(step);
      } else {
        step->second = step->second || here->second != there->second;
        ++step;
      }
    }
  }
  if (steps.empty()) {
    throw SnapshotError(
        {.where = "digests", .expected = "steps that all ranks of both runs have", .got = "none"});
  }
  DigestComparison comparison{.rank_count = *rank_count, .step_count = std::ssize(steps)};
  for (const auto& [step, differs] : steps) {
    if (differs && comparison.different_count++ == 0) comparison.first_step = step;
    if (comparison.different_count == 0) ++comparison.same_until;
  }
  if (comparison.different_count > 0) {
    comparison.first = differences(a, b, comparison.first_step, comparison.rank_count);
  }
  return comparison;
}

std::string to_text(const DigestComparison& comparison) {
  constexpr std::size_t kShown = 10;
  if (comparison.first.empty()) return "same: " + steps_text(comparison.step_count) + "\n";
  std::string text = "step " + std::to_string(comparison.first_step) +
                     " is the first that differs, after " + steps_text(comparison.same_until) +
                     " with equal bits:\n";
  for (std::size_t i = 0; i < std::min(kShown, comparison.first.size()); ++i) {
    const auto& one = comparison.first[i];
    text +=
        "  '" + one.parameter + "' on " + comm::ranks_text(one.ranks, comparison.rank_count) + "\n";
  }
  if (comparison.first.size() > kShown) {
    text += "  and " +
            count_text(std::ssize(comparison.first) - static_cast<std::ptrdiff_t>(kShown)) +
            " more\n";
  }
  return text + "different: " + count_text(comparison.different_count) + " of " +
         steps_text(comparison.step_count) + "\n";
}

nlohmann::ordered_json to_json(const DigestComparison& comparison) {
  nlohmann::ordered_json json{{"verdict", comparison.first.empty() ? "same" : "different"},
                              {"steps", comparison.step_count},
                              {"different_steps", comparison.different_count}};
  if (!comparison.first.empty()) {
    nlohmann::ordered_json parameters = nlohmann::ordered_json::array();
    for (const auto& one : comparison.first) {
      parameters.push_back({{"name", one.parameter}, {"ranks", one.ranks}});
    }
    json["first_different_step"] = comparison.first_step;
    json["parameters"] = std::move(parameters);
  }
  return json;
}

}  // namespace hsdp
