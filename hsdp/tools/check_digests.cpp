#include "hsdp/tools/check_digests.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "hsdp/comm/control/world_end.h"
#include "hsdp/error.h"
#include "hsdp/tools/check_facts.h"
#include "hsdp/tools/text_table.h"

namespace hsdp {
namespace {

void require_alike(std::span<const DigestLog> a, std::span<const DigestLog> b) {
  const DigestHeader& one = a.front().header;
  const DigestHeader& other = b.front().header;
  const auto shape_text = [](const DigestHeader& header) {
    return std::to_string(header.replicate_size) + "x" + std::to_string(header.shard_size);
  };
  if (shape_text(one) != shape_text(other)) {
    throw SnapshotError({.where = "digests",
                         .expected = "runs of one mesh shape",
                         .got = shape_text(one) + " and " + shape_text(other),
                         .remedy = "compare snapshots, which may come from any"});
  }
  for (std::size_t r = 0; r < a.size(); ++r) {
    if (a[r].header == b[r].header) continue;
    throw SnapshotError({.where = "digests",
                         .expected = "the same Reducer and parameters, cut alike",
                         .got = "others on rank " + std::to_string(r),
                         .remedy = "compare snapshots, which may be cut in any way"});
  }
}

std::vector<std::int64_t> common_steps(std::span<const DigestLog> a, std::span<const DigestLog> b) {
  std::vector<std::int64_t> steps;
  for (const auto& one : a.front().steps) {
    const std::int64_t step = one.first;
    const auto has_step = [step](const DigestLog& log) { return log.steps.contains(step); };
    if (std::ranges::all_of(a, has_step) && std::ranges::all_of(b, has_step)) steps.push_back(step);
  }
  return steps;
}

std::vector<DigestComparison::Difference> differences(std::span<const DigestLog> a,
                                                      std::span<const DigestLog> b,
                                                      std::int64_t step) {
  std::vector<DigestComparison::Difference> all;
  for (std::size_t p = 0; p < a.front().header.parts.size(); ++p) {
    DigestComparison::Difference one{a.front().header.parts[p].name, {}};
    for (std::size_t r = 0; r < a.size(); ++r) {
      if (a[r].steps.at(step)[p] != b[r].steps.at(step)[p])
        one.ranks.push_back(static_cast<int>(r));
    }
    if (!one.ranks.empty()) all.push_back(std::move(one));
  }
  return all;
}

std::string steps_text(std::int64_t count) {
  return count_text(count) + (count == 1 ? " step" : " steps");
}

}  // namespace

DigestComparison compare_digests(std::span<const DigestLog> a, std::span<const DigestLog> b) {
  require_alike(a, b);
  DigestComparison comparison;
  comparison.rank_count = static_cast<int>(a.size());
  for (const std::int64_t step : common_steps(a, b)) {
    ++comparison.step_count;
    std::vector<DigestComparison::Difference> found = differences(a, b, step);
    if (found.empty()) {
      if (comparison.different_count == 0) ++comparison.same_until;
      continue;
    }
    if (comparison.different_count++ > 0) continue;
    comparison.first_step = step;
    comparison.first = std::move(found);
  }
  if (comparison.step_count == 0) {
    throw SnapshotError(
        {.where = "digests", .expected = "steps that all ranks of both runs have", .got = "none"});
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
