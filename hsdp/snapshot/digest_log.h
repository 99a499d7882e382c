// Digests of a run's results, one line per step, so that two runs can be compared step by step
// without their gradients. Each rank writes a text file `digests_<rank>.txt`; docs/hsdp_check.md
// describes the format.
//
// One system call writes a line, so a killed rank leaves whole lines and at most one torn line at
// the end, which readers skip. Errors are SnapshotErrors that name the file.
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

// Says which run, rank and parameters the digests of a file belong to.
struct DigestHeader {
  // The elements of a parameter that this rank holds.
  struct Part {
    std::string name;
    std::int64_t offset = 0;
    std::int64_t count = 0;
    bool operator==(const Part&) const = default;
  };
  std::string reducer{};  // the Reducer's name
  int rank = 0;
  int replicate_size = 1;
  int shard_size = 1;
  std::vector<Part> parts{};
  bool operator==(const DigestHeader&) const = default;
};

class DigestWriter {
 public:
  // Continues a file that has the same header. Refuses a file with another header, and one that
  // another writer has open.
  DigestWriter(std::filesystem::path folder, const DigestHeader& header);
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
  // Takes the digests in the order of the parts. If it throws, the file is unchanged.
  void append(std::int64_t step, std::span<const std::uint64_t> digests);

 private:
  std::filesystem::path folder_;
  std::filesystem::path path_;
  comm::UniqueFd fd_;
};

struct DigestLog {
  DigestHeader header;
  // If the run went back to an earlier step, what it had written from that step on is dropped.
  std::map<std::int64_t, std::vector<std::uint64_t>> steps;
};
[[nodiscard]] std::filesystem::path digest_path(const std::filesystem::path& folder, int rank);
// `first`: the header of another rank of the run, which must have the same mesh shape.
[[nodiscard]] DigestLog read_digests(const std::filesystem::path& folder, int rank,
                                     const std::optional<DigestHeader>& first = {});

}  // namespace hsdp
