// hsdp_check --digest: are the results of two runs the same, step by step, by their digests?
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace hsdp {

struct DigestComparison {
  int rank_count = 0;
  std::int64_t step_count = 0;  // that all ranks of both runs have
  std::int64_t same_until = 0;  // so many of them are the same, from the first on
  std::int64_t different_count = 0;
  // The first step that differs, and where.
  struct Difference {
    std::string parameter;
    std::vector<int> ranks;
  };
  std::int64_t first_step = -1;
  std::vector<Difference> first{};
};

// Compares the runs that wrote into these folders. Holds one rank's digests of each at a time.
// Throws SnapshotError if the runs have different meshes or parameters, or no step in common, or if
// a run writes the first step that differs again meanwhile.
[[nodiscard]] DigestComparison compare_digests(const std::filesystem::path& a,
                                               const std::filesystem::path& b);

[[nodiscard]] std::string to_text(const DigestComparison& comparison);
[[nodiscard]] nlohmann::ordered_json to_json(const DigestComparison& comparison);

}  // namespace hsdp
