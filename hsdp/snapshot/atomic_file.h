// A file that appears under its name complete and durable, or not at all
// [Note: renamed into place].
//
// The data goes to a hidden temporary file beside it; commit() syncs and renames that. Without
// commit() the destructor removes it. A killed writer leaves only the temporary file, which readers
// ignore. Every failure is a SnapshotError that names file and cause.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "hsdp/comm/unique_fd.h"

namespace hsdp {

class AtomicFile {
 public:
  // Creates the temporary file now, so that a missing or forbidden folder shows at once.
  // `component`: what the file is, first in messages.
  explicit AtomicFile(const std::filesystem::path& path, const char* component = "snapshot");
  AtomicFile(AtomicFile&& other) noexcept = default;
  AtomicFile& operator=(AtomicFile&&) = delete;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  // Whether `path` is named like a file before commit().
  [[nodiscard]] static bool is_temporary(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::filesystem::path path_;
  const char* component_;
  std::filesystem::path temporary_;
  comm::UniqueFd fd_;  // open until commit()
};

// Makes changes of names in a folder durable.
void sync_folder(const std::filesystem::path& folder);
// "." for a name without a folder.
[[nodiscard]] std::filesystem::path folder_of(const std::filesystem::path& path);

}  // namespace hsdp
