// Gradients on disk: one HDF5 file per rank, or one for all. docs/snapshot_format.md describes the
// bytes for other readers.
//
// A file is written under a temporary name, synced, then renamed: a killed writer never leaves a
// file that passes. Saving over an older snapshot replaces it: rank 0 removes files of ranks that
// the new one does not have. Until all ranks have saved, readers refuse what is there. A partial
// keeps sum and divisor [Note: sums and divisors apart]. Bad or foreign files throw SnapshotError;
// nothing crashes on any input.
//
// Writing enters the HDF5 library, which is not made for threads. It does so inside the calls that
// begin to write (write_snapshot_file(), write_snapshot(), SnapshotWriter::submit(),
// Reducer::save_snapshot()), on the thread that calls them and on no other. An application that
// uses the same library on other threads keeps the two apart: by a lock of its own around these
// calls, or by set_hdf5_gate(). Nothing else here enters HDF5, reading included.
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

// The newest; a file says the oldest that has all it holds.
constexpr int kSnapshotSchemaVersion = 2;

class ParameterReader;

// What every file of a snapshot says about the run; equal in all files but for `rank`.
struct SnapshotInfo {
  std::string id{};       // random, agreed by the ranks; mixed ids are refused
  std::string reducer{};  // ReducerOptions::name
  std::int64_t step = 0;
  int replicate_size = 1;
  int shard_size = 1;
  int rank = 0;  // in the mesh's world: replica * shard_size + shard
  std::int64_t microbatch_count = 0;
  double divide_factor = 1.0;  // f
  double loss_scale = 1.0;     // s
  std::optional<Dtype>
      replica_dtype{};  // wire of the replica hop; none: each parameter's reduce_dtype
  std::string replica_hop = "plain";  // ReplicaHop::describe()
  bool quantizes = false;             // ReplicaHop::quantizes()
  std::string reduction = "exact";    // "exact" or "native"
  std::string layout = "flat";        // "flat", "dim0", "whole" or "full" (plain named arrays)
  std::string engine = "host";
  bool partial = false;  // the data is the undivided shard-group sum; the divisor is apart
};

// One parameter's slice as this rank holds it: elements [offset, offset + data.count) of the
// flattened gradient. `data` is f32, or f64 of f64 gradients (bf16, f16 for plain arrays),
// contiguous, host memory.
struct SnapshotEntry {
  std::string name{};
  Shape shape{};
  Dtype dtype = Dtype::kF32;         // the parameter's gradient dtype
  Dtype reduce_dtype = Dtype::kF32;  // wire of the shard hop
  std::int64_t offset = 0;
  ConstTensorView data{};
};

// How HDF5 is entered: `gate` calls `enter` once before it returns, with whatever lock keeps others
// out of HDF5 held. Empty: `enter` is called at once. It counts for every later call.
using Hdf5Gate = std::function<void(const std::function<void()>& enter)>;
void set_hdf5_gate(Hdf5Gate gate);

// An array that one rank keeps beside the gradients: of its replica hop's state (HopState). `data`
// is f32, f64, i64 or u8, contiguous, in host memory. Keys are like names of parameters.
struct SnapshotState {
  std::string key{};
  ConstTensorView data{};
};

// Writes one rank's file now: `path/rank_00003.h5` (the directory is made), or `path` itself when
// it ends in .h5 and the snapshot has one file. Blocks until it is durable.
void write_snapshot_file(const std::filesystem::path& path, const SnapshotInfo& info,
                         std::span<const SnapshotEntry> entries,
                         std::span<const SnapshotState> hop_state = {});

// Writes plain named arrays (layout "full": every entry is a whole parameter) as one file, or as
// this rank's file when `path` is a directory. An empty info.id is replaced by a random one.
void write_snapshot(const std::filesystem::path& path, SnapshotInfo info,
                    std::span<const SnapshotEntry> entries);

// What files and reports call it: "f32", "bf16", "f16" or "own".
constexpr std::string_view kOwnDtype = "own";
[[nodiscard]] std::string replica_dtype_text(const SnapshotInfo& info);

// Whether a snapshot can hold the text, a parameter's name: it is UTF-8.
[[nodiscard]] bool is_snapshot_text(const std::string& text);

// A random id for SnapshotInfo: one rank draws it, the others are told.
[[nodiscard]] std::string new_snapshot_id();

// Copies the data at memory bandwidth and writes in the background, one file after another; the
// caller may overwrite its gradients when submit() returns. Keeps the memory of one copy for the
// next.
class SnapshotWriter {
 public:
  // Counts its copies there, and the memory of one that it keeps for the next.
  explicit SnapshotWriter(MemoryCount count = {});
  ~SnapshotWriter();  // waits for what was submitted; errors not fetched by flush() are lost
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // Throws SnapshotError at once for what can be known at once (no such directory, no permission)
  // and rethrows the error of an earlier background write.
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

// A snapshot opened for reading: the directory or the single file. Checks on opening that the files
// belong together, that none is missing, and that the slices tile every parameter; data is read on
// demand and checksums are checked by read() and validation.
class Snapshot {
 public:
  [[nodiscard]] static Snapshot open(const std::filesystem::path& path);

  [[nodiscard]] const SnapshotInfo& info() const;  // of the first file
  [[nodiscard]] const std::vector<SnapshotParameter>& parameters() const;
  [[nodiscard]] const std::filesystem::path& path() const;
  // Whole sets of slices in the snapshot: one per replica ("full": one per file).
  [[nodiscard]] int copy_count() const;
  // Elements [begin, begin + out.size()) of the flattened mean gradient of a parameter as replica
  // `replica` holds it (partials: divided by f s), reassembled from shards, in fp64 or fp32.
  void read(std::size_t parameter, int replica, std::int64_t begin, std::span<float> out) const;
  void read(std::size_t parameter, int replica, std::int64_t begin, std::span<double> out) const;

  // The replica hop's state as the rank of that file has kept it; without data.
  struct StateArray {
    std::string key;
    Dtype dtype = Dtype::kF32;
    std::int64_t count = 0;
  };
  [[nodiscard]] int file_count() const;
  [[nodiscard]] std::vector<StateArray> hop_state(int file) const;
  // All of hop_state(file)[array], into as many bytes.
  void read_hop_state(int file, std::size_t array, std::span<std::byte> out) const;

 private:
  Snapshot() = default;
  friend class ParameterReader;
  struct Files;
  std::shared_ptr<const Files> files_;
};

}  // namespace hsdp
