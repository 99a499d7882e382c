// One snapshot file, opened for reading. Header and structure are checked once, the data block by
// block as it is read. Any content is safe: invalid bytes throw SnapshotError naming the file.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "hsdp/comm/unique_fd.h"
#include "hsdp/snapshot/snapshot_header.h"

namespace hsdp {

class SnapshotFile {
 public:
  [[nodiscard]] static SnapshotFile open(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] const SnapshotHeader& header() const { return header_; }

  // Returns a descriptor for read_block(). Throws SnapshotError if the file was replaced since
  // open(). No descriptor stays open, so a snapshot may have more files than a process may open.
  [[nodiscard]] comm::UniqueFd reopen() const;
  // Reads block `block` of a slice into `buffer` (kChecksumBlockBytes) and checks it.
  [[nodiscard]] std::span<const std::byte> read_block(int fd, const SnapshotSlice& slice,
                                                      std::size_t block,
                                                      std::span<std::byte> buffer) const;
  [[noreturn]] void fail(const std::string& what) const;

 private:
  void load(int fd);
  void load_structure(int fd, std::uint64_t header_bytes, const HeaderPrefix& prefix);

  std::filesystem::path path_;
  SnapshotHeader header_;
  std::vector<std::uint64_t> block_checksums_;
  std::uint64_t file_bytes_ = 0;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

// Whether a regular file begins like a snapshot file, complete or not. Follows links.
[[nodiscard]] bool is_snapshot_file(const std::filesystem::path& path);

}  // namespace hsdp
