// Writes snapshots of known gradients on any mesh.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "hsdp/snapshot.h"
#include "tests/support/temporary_directory.h"

namespace hsdp::testing {

using test::TemporaryDirectory;

struct NamedGradient {
  std::string name;
  Shape shape;
  std::vector<float> data;
};

inline std::vector<float> random_values(std::int64_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

// Odd shapes, an empty parameter, a scalar, names that HDF5 cannot take as they are, and more than
// one checksum block.
inline std::vector<NamedGradient> some_gradients(unsigned seed = 1) {
  std::vector<NamedGradient> gradients;
  const std::vector<std::pair<std::string, Shape>> facts{{"layer.0.weight", {5, 3}},
                                                         {"block/attention/out", {7}},
                                                         {"odd names: %2F .. \xc3\xa9", {2, 2, 2}},
                                                         {"empty", {0}},
                                                         {"scalar", {}},
                                                         {".", {3}},
                                                         {"big", {401, 499}}};
  for (const auto& [name, shape] : facts) {
    gradients.push_back({name, shape, random_values(element_count(shape), seed++)});
  }
  return gradients;
}

struct SliceRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

inline SliceRange slice_of(const std::string& layout, const Shape& shape, int shard_size,
                           int shard_rank) {
  const std::int64_t count = element_count(shape);
  if (layout == "full") return {0, count};
  // Rows for dim0 (a scalar is one row), elements for flat.
  const std::int64_t rows = layout == "dim0" ? (shape.empty() ? 1 : shape[0]) : count;
  const std::int64_t width = rows == 0 ? 0 : count / rows;
  const std::int64_t cut = (rows + shard_size - 1) / shard_size;
  const std::int64_t begin = std::min(rows, cut * shard_rank);
  return {begin * width, std::min(rows, begin + cut) * width};
}

inline SnapshotInfo mesh_info(int replicate, int shard, const std::string& layout = "flat") {
  SnapshotInfo info;
  info.id = "0123456789abcdef";
  info.step = 42;
  info.replicate_size = replicate;
  info.shard_size = shard;
  info.microbatch_count = 4;
  info.divide_factor = replicate * shard;
  info.layout = layout;
  return info;
}

inline std::vector<SnapshotEntry> slices_of(const std::vector<NamedGradient>& gradients,
                                            const SnapshotInfo& info,
                                            Dtype reduce_dtype = Dtype::kF32) {
  std::vector<SnapshotEntry> entries;
  for (const NamedGradient& gradient : gradients) {
    const SliceRange range =
        slice_of(info.layout, gradient.shape, info.shard_size, info.rank % info.shard_size);
    SnapshotEntry entry;
    entry.name = gradient.name;
    entry.shape = gradient.shape;
    entry.reduce_dtype = reduce_dtype;
    entry.offset = range.begin;
    entry.data = {gradient.data.data() + range.begin, range.end - range.begin, Dtype::kF32};
    entries.push_back(entry);
  }
  return entries;
}

// The entries are views, so a temporary would be destroyed before they are written.
std::vector<SnapshotEntry> slices_of(std::vector<NamedGradient>&& gradients,
                                     const SnapshotInfo& info,
                                     Dtype reduce_dtype = Dtype::kF32) = delete;

// Writes one file per rank; all replicas have the same data.
inline void write_mesh(const std::filesystem::path& path,
                       const std::vector<NamedGradient>& gradients, SnapshotInfo info,
                       Dtype reduce_dtype = Dtype::kF32) {
  for (info.rank = 0; info.rank < info.replicate_size * info.shard_size; ++info.rank) {
    write_snapshot_file(path, info, slices_of(gradients, info, reduce_dtype));
  }
}

inline std::vector<float> read_all(const Snapshot& snapshot, std::size_t parameter,
                                   int replica = 0) {
  std::vector<float> values(static_cast<std::size_t>(snapshot.parameters()[parameter].count));
  snapshot.read(parameter, replica, 0, std::span<float>(values));
  return values;
}

inline std::vector<char> file_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void write_bytes(const std::filesystem::path& path, const std::vector<char>& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace hsdp::testing
