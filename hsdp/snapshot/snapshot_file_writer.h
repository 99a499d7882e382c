// Writes one snapshot file in two steps. open() detects early errors and has HDF5 lay out the file,
// on the caller's thread; write() makes it durable, later and on any thread.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hsdp/snapshot.h"
#include "hsdp/snapshot/atomic_file.h"
#include "hsdp/snapshot/hdf5_structure.h"
#include "hsdp/snapshot/snapshot_header.h"

namespace hsdp {

class SnapshotFileWriter {
 public:
  // Throws UsageError for invalid facts, and SnapshotError if the folder or file cannot be made.
  static SnapshotFileWriter open(const std::filesystem::path& path, const SnapshotInfo& info,
                                 std::span<const SnapshotEntry> entries,
                                 std::span<const SnapshotState> hop_state);

  // `data` holds the bytes of the entries, then of the state's arrays.
  void write(std::span<const std::span<const std::byte>> data);

 private:
  SnapshotFileWriter(SnapshotHeader header, AtomicFile file, bool in_folder,
                     std::vector<std::filesystem::path> grown_folders)
      : header_(std::move(header)),
        file_(std::move(file)),
        in_folder_(in_folder),
        grown_folders_(std::move(grown_folders)) {}

  SnapshotHeader header_;
  AtomicFile file_;
  bool in_folder_;                                    // together with other ranks' files
  std::vector<std::filesystem::path> grown_folders_;  // those in which a folder was made
  Hdf5Structure structure_;
};

[[nodiscard]] std::string rank_file_name(int rank);
// The rank whose file has this name, or -1.
[[nodiscard]] int rank_of_file(const std::string& name);
[[nodiscard]] std::span<const std::byte> bytes_of(const ConstTensorView& view);
// The bytes in the order of SnapshotFileWriter::write().
[[nodiscard]] std::vector<std::span<const std::byte>> all_bytes(
    std::span<const SnapshotEntry> entries, std::span<const SnapshotState> hop_state);

}  // namespace hsdp
