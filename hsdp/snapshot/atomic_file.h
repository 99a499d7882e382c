// A file that appears under its name whole and durable, or not at all [Note: renamed into place].
//
// Written under a hidden temporary name beside its own; commit() syncs and renames it. Without
// commit() the destructor removes it; a killed writer leaves only the temporary name, which readers
// ignore. Every failure is a SnapshotError that names the file and the cause.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "hsdp/comm/unique_fd.h"

namespace hsdp {

class AtomicFile {
 public:
  // Creates the temporary file now, so that a missing or forbidden folder is known at once.
  explicit AtomicFile(const std::filesystem::path& path);
  AtomicFile(AtomicFile&& other) noexcept = default;
  AtomicFile& operator=(AtomicFile&&) = delete;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  // Whether a file has the name that one has before commit().
  [[nodiscard]] static bool is_temporary(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  comm::UniqueFd fd_;  // open: not committed yet
};

// Makes the names in a folder durable.
void sync_folder(const std::filesystem::path& folder);
// "." for a name without a folder.
[[nodiscard]] std::filesystem::path folder_of(const std::filesystem::path& path);

}  // namespace hsdp
