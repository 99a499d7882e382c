// Writes a Reducer's results to files: snapshots, and digests of this rank's slices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/reducer/results.h"
#include "hsdp/snapshot.h"
#include "hsdp/snapshot/digest_log.h"

namespace hsdp::reducer {

class ResultFiles {
 public:
  // All of these outlive it.
  ResultFiles(const ReducerOptions& options, const ParameterTable& parameters, Results& results,
              std::string snapshot_id, MemoryCount memory);

  void save_snapshot(const std::filesystem::path& path, std::int64_t step);
  void save_digest(const std::filesystem::path& folder, std::int64_t step);
  void flush() { snapshots_.flush(); }
  void close() {
    digests_.reset();
    snapshots_.flush();
  }

 private:
  [[nodiscard]] std::vector<SnapshotEntry> snapshot_entries(Buffer& copies);
  [[nodiscard]] Buffer gather_replica_parts(std::vector<SnapshotEntry>& entries);
  [[nodiscard]] std::vector<std::byte> copy_to_host(std::vector<SnapshotEntry>& entries,
                                                    std::vector<SnapshotState>& hop_state);

  const ReducerOptions& options_;
  const ParameterTable& parameters_;
  Results& results_;
  Groups& groups_;
  Steps& steps_;
  std::string snapshot_id_;
  MemoryCount memory_;
  SnapshotWriter snapshots_;
  std::optional<DigestWriter> digests_;
};

}  // namespace hsdp::reducer
