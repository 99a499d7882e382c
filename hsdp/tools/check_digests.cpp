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

[[noreturn]] void refuse_changed(const std::filesystem::path& path, std::int64_t step) {
  throw SnapshotError({.where = "digests: " + path.string(),
                       .expected = "step " + std::to_string(step) + " as it was read before",
                       .got = "another, as the files change while they are read",
                       .remedy = "compare again once no run writes there"});
}

// Reads the files again; a run may have changed them since.
std::vector<DigestComparison::Difference> differences(const std::filesystem::path& a,
                                                      const std::filesystem::path& b,
                                                      std::int64_t step,
                                                      const DigestHeader& first) {
  std::map<std::size_t, DigestComparison::Difference> found;  // by parameter index
  for (int rank = 0; rank < first.replicate_size * first.shard_size; ++rank) {
    const DigestLog one = read_digests(a, rank, first);
    const DigestLog other = read_digests(b, rank, first);
    require_alike(one.header, other.header);
    const auto here = one.steps.find(step);
    if (here == one.steps.end()) refuse_changed(digest_path(a, rank), step);
    const auto there = other.steps.find(step);
    if (there == other.steps.end()) refuse_changed(digest_path(b, rank), step);
    for (std::size_t p = 0; p < here->second.size(); ++p) {
      if (here->second[p] == there->second[p]) continue;
      found[p].parameter = one.header.parts[p].name;
      found[p].ranks.push_back(rank);
    }
  }
  if (found.empty()) refuse_changed(b, step);
  std::vector<DigestComparison::Difference> all;
  all.reserve(found.size());
  for (auto& [place, one] : found) all.push_back(std::move(one));
  return all;
}

std::string steps_text(std::int64_t count) {
  return count_text(count) + (count == 1 ? " step" : " steps");
}

}  // namespace

DigestComparison compare_digests(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::map<std::int64_t, bool> steps;  // common to all ranks so far; true if a rank differs
  std::optional<DigestHeader> first;
  int rank_count = 1;
  for (int rank = 0; rank < rank_count; ++rank) {
    const DigestLog one = read_digests(a, rank, first);
    const DigestLog other = read_digests(b, rank, first);
    require_alike(one.header, other.header);
    if (!first) {
      first = one.header;
      rank_count = first->replicate_size * first->shard_size;
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
  DigestComparison comparison{.rank_count = rank_count, .step_count = std::ssize(steps)};
  for (const auto& [step, differs] : steps) {
    if (differs && comparison.different_count++ == 0) comparison.first_step = step;
    if (comparison.different_count == 0) ++comparison.same_until;
  }
  if (comparison.different_count > 0) {
    comparison.first = differences(a, b, comparison.first_step, *first);
  }
  return comparison;
}

std::string to_text(const DigestComparison& comparison) {
  constexpr std::size_t kShown = 10;
  if (comparison.different_count == 0) return "same: " + steps_text(comparison.step_count) + "\n";
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
  nlohmann::ordered_json json{{"verdict", comparison.different_count == 0 ? "same" : "different"},
                              {"steps", comparison.step_count},
                              {"different_steps", comparison.different_count}};
  if (comparison.different_count > 0) {
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
