// Gradients on disk: one HDF5 file per rank, or one for all. docs/snapshot_format.md describes the
// bytes for other readers.
//
// A file is written under a temporary name, synced, then renamed: a killed writer never leaves a
// file that readers accept. Saving over an older snapshot replaces it: rank 0 removes files of
// ranks that the new one lacks. Until all ranks have saved, readers reject it. A partial keeps sum
// and divisor [Note: sums and divisors apart]. Damaged or foreign files throw SnapshotError; no
// input causes a crash.
//
// Writing calls the HDF5 library, which is not thread-safe. Only the calls that begin to write
// (write_snapshot_file(), write_snapshot(), SnapshotWriter::submit(), Reducer::save_snapshot()) do
// so, and only on the calling thread. An application that uses the same library on other threads
// must keep the two apart, with a lock around these calls or with set_hdf5_gate(). Nothing else
// here calls HDF5, not even reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/memory_count.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

// The newest version; a file states the oldest version that can hold its content.
constexpr int kSnapshotSchemaVersion = 2;

class ParameterReader;

// What every file of a snapshot says about the run; equal in all files except for `rank`.
struct SnapshotInfo {
  std::string id{};       // random, agreed by the ranks; files with different ids are rejected
  std::string reducer{};  // ReducerOptions::name
  std::int64_t step = 0;
  int replicate_size = 1;
  int shard_size = 1;
  int rank = 0;  // in the mesh's world: replica * shard_size + shard
  std::int64_t microbatch_count = 0;
  double divide_factor = 1.0;  // f
  double loss_scale = 1.0;     // s
  std::optional<Dtype>
      replica_dtype{};  // wire dtype of the replica hop; none: each parameter's reduce_dtype
  std::string replica_hop = "plain";  // ReplicaHop::describe()
  bool quantizes = false;             // ReplicaHop::quantizes()
  std::string reduction = "exact";    // "exact" or "native"
  std::string layout = "flat";        // "flat", "dim0", "whole" or "full" (plain named arrays)
  std::string engine = "host";
  bool partial = false;  // the data is the undivided shard-group sum, stored with its divisor
};

// One parameter's slice as this rank holds it: elements [offset, offset + data.count) of the
// flattened gradient. `data` is f32, or f64 for f64 gradients (bf16, f16 for plain arrays),
// contiguous, in host memory.
struct SnapshotEntry {
  std::string name{};
  Shape shape{};
  Dtype dtype = Dtype::kF32;         // the parameter's gradient dtype
  Dtype reduce_dtype = Dtype::kF32;  // wire dtype of the shard hop
  std::int64_t offset = 0;
  ConstTensorView data{};
};

// Sets how HDF5 is called: `gate` calls `enter` once before it returns, while holding the lock that
// keeps others out of HDF5. If empty, `enter` is called directly. Applies to all later calls.
using Hdf5Gate = std::function<void(const std::function<void()>& enter)>;
void set_hdf5_gate(Hdf5Gate gate);

// An array that one rank stores beside the gradients, from its replica hop's state (HopState).
// `data` is f32, f64, i64 or u8, contiguous, in host memory. Keys are like parameter names.
struct SnapshotState {
  std::string key{};
  ConstTensorView data{};
};

// Writes one rank's file now: `path/rank_00003.h5` (making the directory), or `path` itself if it
// ends in .h5 and the snapshot has one file. Blocks until it is durable.
void write_snapshot_file(const std::filesystem::path& path, const SnapshotInfo& info,
                         std::span<const SnapshotEntry> entries,
                         std::span<const SnapshotState> hop_state = {});

// Writes plain named arrays (layout "full": every entry is a whole parameter) as one file, or as
// this rank's file if `path` is a directory. Replaces an empty info.id with a random one.
void write_snapshot(const std::filesystem::path& path, SnapshotInfo info,
                    std::span<const SnapshotEntry> entries);

// Its name in files and reports: "f32", "bf16", "f16" or "own".
constexpr std::string_view kOwnDtype = "own";
[[nodiscard]] std::string replica_dtype_text(const SnapshotInfo& info);

// Whether a snapshot can hold the text, for example as a parameter's name: it must be UTF-8.
[[nodiscard]] bool is_snapshot_text(const std::string& text);

// A random id for SnapshotInfo: one rank draws it and tells the others.
[[nodiscard]] std::string new_snapshot_id();

// Copies the data at memory bandwidth and writes in the background, one file after another. The
// caller may overwrite its gradients once submit() returns. Keeps one copy's memory for reuse.
class SnapshotWriter {
 public:
  // `count` includes its copies, and the memory of one that it keeps for reuse.
  explicit SnapshotWriter(MemoryCount count = {});
  ~SnapshotWriter();  // waits for submitted writes; errors not fetched by flush() are lost
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // Throws SnapshotError for problems that show immediately (no such directory, no permission), and
  // rethrows the error of an earlier background write.
  void submit(const std::filesystem::path& path, const SnapshotInfo& info,
              std::span<const SnapshotEntry> entries,
              std::span<const SnapshotState> hop_state = {});
  // Waits until everything submitted is durable; throws the first error.
  void flush();

 private:
  class Queue;
  std::unique_ptr<Queue> queue_;
};

// One parameter of a whole snapshot, over all its files.
struct SnapshotParameter {
  std::string name;
  Shape shape;
  Dtype dtype = Dtype::kF32;
  Dtype reduce_dtype = Dtype::kF32;
  std::int64_t count = 0;
};

// A snapshot opened for reading: the directory or the single file. Opening it checks that the files
// belong together, that none is missing, and that the slices tile every parameter. Data is read on
// demand; read() and validation check its checksums.
class Snapshot {
 public:
  [[nodiscard]] static Snapshot open(const std::filesystem::path& path);

  [[nodiscard]] const SnapshotInfo& info() const;  // of the first file
  [[nodiscard]] const std::vector<SnapshotParameter>& parameters() const;
  [[nodiscard]] const std::filesystem::path& path() const;
  // Complete sets of slices in the snapshot: one per replica ("full": one per file).
  [[nodiscard]] int copy_count() const;
  // Reads elements [begin, begin + out.size()) of the flattened mean gradient of a parameter as
  // replica `replica` holds it (partials: divided by f s), assembled from shards, in fp64 or fp32.
  void read(std::size_t parameter, int replica, std::int64_t begin, std::span<float> out) const;
  void read(std::size_t parameter, int replica, std::int64_t begin, std::span<double> out) const;

  // The replica hop's state stored by the rank of that file; without data.
  struct StateArray {
    std::string key;
    Dtype dtype = Dtype::kF32;
    std::int64_t count = 0;
  };
  [[nodiscard]] int file_count() const;
  [[nodiscard]] std::vector<StateArray> hop_state(int file) const;
  // Reads all of hop_state(file)[array] into `out`, of the same size.
  void read_hop_state(int file, std::size_t array, std::span<std::byte> out) const;

 private:
  Snapshot() = default;
  friend class ParameterReader;
  struct Files;
  std::shared_ptr<const Files> files_;
};

}  // namespace hsdp
