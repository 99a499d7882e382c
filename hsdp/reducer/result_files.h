// Writes a Reducer's results to files: snapshots, and digests of this rank's slices. Called by the
// thread that drives the steps.
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
  struct Sources {
    const ReducerOptions& options;
    const ParameterTable& parameters;
    Groups& groups;
    Steps& steps;
    Results& results;
  };
  ResultFiles(const Sources& sources, std::string snapshot_id, MemoryCount memory);

  // Throws a UsageError unless there is a result or, with results that are not sharded over the
  // mesh, a partial. Collective if they are: the replicas gather a shard rank's slices. Copies what
  // the file needs; another thread writes it, and the next flush() or save throws its error.
  void save_snapshot(const std::filesystem::path& path, std::int64_t step);
  // Local. Throws a UsageError unless there is a result, and what the file system reports.
  void save_digest(const std::filesystem::path& folder, std::int64_t step);
  // Waits until the snapshots are written. Throws the first error.
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
  Groups& groups_;
  Steps& steps_;
  Results& results_;
  std::string snapshot_id_;
  MemoryCount memory_;
  SnapshotWriter snapshots_;
  std::optional<DigestWriter> digests_;
};

}  // namespace hsdp::reducer
