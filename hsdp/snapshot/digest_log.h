// Digests of a run's results, a line a step, so that two runs can be compared step by step without
// their gradients. docs/hsdp_check.md has the format: one text file a rank, `digests_<rank>.txt`.
//
// A line is written by one call of the system, so a killed rank leaves whole lines and at most a
// torn last one, which readers leave out. Errors are SnapshotErrors that name the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hsdp/comm/unique_fd.h"

namespace hsdp {

// Whose digests a file has.
struct DigestHeader {
  // This rank's elements of a parameter.
  struct Part {
    std::string name;
    std::int64_t offset = 0;
    std::int64_t count = 0;
    bool operator==(const Part&) const = default;
  };
  std::string reducer{};  // its name
  int rank = 0;
  int replicate_size = 1;
  int shard_size = 1;
  std::vector<Part> parts{};
  bool operator==(const DigestHeader&) const = default;
};

class DigestWriter {
 public:
  // Continues a file of the same header, and refuses any other, and one that another writer has
  // open.
  DigestWriter(std::filesystem::path folder, const DigestHeader& header);
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  // In the order of the parts. Where it throws, the file is as it was before.
  void append(std::int64_t step, std::span<const std::uint64_t> digests);

 private:
  std::filesystem::path folder_;
  std::filesystem::path path_;
  comm::UniqueFd fd_;
};

struct DigestLog {
  DigestHeader header;
  // Of a run that went back to an earlier step, those before it and those after that.
  std::map<std::int64_t, std::vector<std::uint64_t>> steps;
};
[[nodiscard]] std::filesystem::path digest_path(const std::filesystem::path& folder, int rank);
// `first`: the header of another rank of the run, whose mesh must have the same shape.
[[nodiscard]] DigestLog read_digests(const std::filesystem::path& folder, int rank,
                                     const std::optional<DigestHeader>& first = {});

}  // namespace hsdp
