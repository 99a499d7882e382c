// The header at the front of every snapshot file: everything hsdp needs to find and check the data.
// docs/snapshot_format.md describes the bytes.
//
// The header fills the HDF5 user block, which HDF5 readers skip; besides it hsdp reads only the
// data [Note: HDF5 for others]. The decoders accept any bytes: they throw SnapshotError or return
// numbers that are all in bounds.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/snapshot.h"

namespace hsdp {

constexpr std::string_view kSnapshotMagic = "HSDPSNAP";
// Magic, version, length of the JSON text, file size, two checksums.
constexpr std::size_t kHeaderPrefixBytes = 40;
constexpr std::size_t kMaxHeaderJsonBytes = std::size_t{16} << 20;
constexpr std::size_t kMaxNameBytes = 4096;
constexpr std::size_t kMaxDimensions = 32;
constexpr int kMaxSnapshotRanks = 1 << 20;

// One parameter's slice in one file.
struct SnapshotSlice {
  std::string name;
  Shape shape;
  Dtype dtype = Dtype::kF32;
  Dtype reduce_dtype = Dtype::kF32;
  Dtype data_dtype = Dtype::kF32;
  std::int64_t offset = 0;        // first element in the flattened parameter
  std::int64_t count = 0;         // elements in this file
  std::uint64_t data_offset = 0;  // of the first byte in the file; 0 without elements
  std::size_t first_block = 0;    // in the checksum table

  [[nodiscard]] std::uint64_t data_bytes() const {
    return static_cast<std::uint64_t>(count) * size_bytes(data_dtype);
  }
};

struct SnapshotHeader {
  SnapshotInfo info;
  int file_count = 1;
  std::vector<SnapshotSlice> slices;
  // Arrays of the replica hop's state, stored as whole slices named by their keys.
  std::vector<SnapshotSlice> hop_state;
  std::uint64_t checksums_offset = 0;  // of the table of block checksums, in the file
  std::size_t block_count = 0;
};

// Calls visit(slice) for every slice with data in the file, in the order of its blocks.
template <typename Header, typename Visit>
void for_each_slice(Header& header, Visit visit) {
  for (auto& slice : header.slices) visit(slice);
  for (auto& slice : header.hop_state) visit(slice);
}

// The oldest version that can hold the header's content.
[[nodiscard]] inline std::uint32_t schema_version(const SnapshotHeader& header) {
  return header.hop_state.empty() ? 1 : 2;
}

// The fixed part, before the JSON text.
struct HeaderPrefix {
  std::uint32_t schema_version = kSnapshotSchemaVersion;
  std::uint32_t json_bytes = 0;
  std::uint64_t file_bytes = 0;
  std::uint64_t structure_checksum = 0;  // all bytes after the JSON text that are not data
  std::uint64_t header_checksum = 0;     // the prefix before this field, then the JSON text
};

struct ByteRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

[[nodiscard]] std::string encode_json(const SnapshotHeader& header);
[[nodiscard]] SnapshotHeader decode_json(std::string_view json, std::uint64_t file_bytes);

using PrefixBytes = std::array<std::byte, kHeaderPrefixBytes>;
// encode_prefix() fills in the header checksum.
[[nodiscard]] PrefixBytes encode_prefix(HeaderPrefix prefix, std::string_view json);
// Throws SnapshotError unless magic and schema version are ours.
[[nodiscard]] HeaderPrefix decode_prefix(std::span<const std::byte> bytes);
[[nodiscard]] std::uint64_t header_checksum(const HeaderPrefix& prefix, std::string_view json);

// The ranges after the header without parameter data, in file order: the structure checksum covers
// them. Throws SnapshotError if data ranges overlap.
[[nodiscard]] std::vector<ByteRange> structure_ranges(const SnapshotHeader& header,
                                                      std::uint64_t header_bytes,
                                                      std::uint64_t file_bytes);

// Why a header is invalid, or nothing. The writer rejects what the reader would reject.
[[nodiscard]] std::optional<std::string> find_fault(const SnapshotHeader& header);

// Makes text from a file fit for messages and terminals: control characters become '?', and long
// text is cut.
[[nodiscard]] std::string printable(std::string_view text, std::size_t max_bytes = 200);

}  // namespace hsdp
