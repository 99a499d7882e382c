// hsdp_check --digest: compares the results of two runs step by step, by their digests.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace hsdp {

struct DigestComparison {
  int rank_count = 0;
  std::int64_t step_count = 0;  // steps that all ranks of both runs have
  std::int64_t same_until = 0;  // how many of these, from the first one on, are the same
  std::int64_t different_count = 0;
  // A parameter that differs in the first different step, and the ranks where it does.
  struct Difference {
    std::string parameter;
    std::vector<int> ranks;
  };
  std::int64_t first_step = -1;
  std::vector<Difference> first{};
};

// Compares the runs that wrote into these folders. Holds the digests of one rank per run at a time.
// Throws SnapshotError if the runs have different meshes or parameters, or no step in common, or if
// a run rewrites the first different step during the comparison.
[[nodiscard]] DigestComparison compare_digests(const std::filesystem::path& a,
                                               const std::filesystem::path& b);

[[nodiscard]] std::string to_text(const DigestComparison& comparison);
[[nodiscard]] nlohmann::ordered_json to_json(const DigestComparison& comparison);

}  // namespace hsdp
