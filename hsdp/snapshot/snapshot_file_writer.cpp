#include "hsdp/snapshot/snapshot_file_writer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <system_error>

#include "hsdp/error.h"
#include "hsdp/snapshot/block_checksums.h"
#include "hsdp/snapshot/hdf5_structure.h"
#include "hsdp/snapshot/snapshot_file.h"

namespace hsdp {
namespace {

constexpr std::size_t kMinUserBlockBytes = 512;

void require_on_host(const std::string& name, const ConstTensorView& data) {
  if (data.device.type != DeviceType::kHost) {
    throw UsageError({.where = "snapshot: data of '" + printable(name) + "'",
                      .expected = "host memory",
                      .got = to_string(data.device),
                      .remedy = "copy it to the host first"});
  }
  if (data.count > 0 && data.data == nullptr) {
    throw UsageError({.where = "snapshot: data of '" + printable(name) + "'",
                      .expected = "memory",
                      .got = "a null pointer"});
  }
}

SnapshotSlice to_slice(const SnapshotEntry& entry) {
  require_on_host(entry.name, entry.data);
  SnapshotSlice slice;
  slice.name = entry.name;
  slice.shape = entry.shape;
  slice.dtype = entry.dtype;
  slice.reduce_dtype = entry.reduce_dtype;
  slice.data_dtype = entry.data.dtype;
  slice.offset = entry.offset;
  slice.count = entry.data.count;
  return slice;
}

SnapshotSlice to_slice(const SnapshotState& array) {
  require_on_host(array.key, array.data);
  SnapshotSlice slice;
  slice.name = array.key;
  slice.shape = {array.data.count};
  slice.data_dtype = array.data.dtype;
  slice.count = array.data.count;
  return slice;
}

bool names_a_file(const std::filesystem::path& path) { return path.extension() == ".h5"; }

// Makes the snapshot's folder; returns the existing folders that gained one.
std::vector<std::filesystem::path> make_folder(const std::filesystem::path& path) {
  std::error_code error;
  std::vector<std::filesystem::path> grown;
  auto folder = path.has_filename() ? path : path.parent_path();
  while (!folder.empty() && !std::filesystem::exists(folder, error)) {
    grown.push_back(folder_of(folder));
    folder = folder.parent_path();
  }
  std::filesystem::create_directories(path, error);
  if (error) {
    throw SnapshotError("snapshot: cannot make the directory " + path.string() + ": " +
                        error.message());
  }
  return grown;
}

// The offsets in the header depend on where HDF5 places the data, which depends on the header's
// size: leave space for the longest offsets.
std::size_t user_block_bytes(SnapshotHeader header) {
  constexpr auto kLongest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  header.checksums_offset = kLongest;
  for_each_slice(header, [](SnapshotSlice& slice) { slice.data_offset = kLongest; });
  const std::size_t json_bytes = encode_json(header).size();
  if (json_bytes > kMaxHeaderJsonBytes) {
    throw UsageError({.where = "snapshot: names and shapes",
                      .expected = "at most " + std::to_string(kMaxHeaderJsonBytes) + " bytes",
                      .got = std::to_string(json_bytes)});
  }
  return std::max(kMinUserBlockBytes, std::bit_ceil(kHeaderPrefixBytes + json_bytes));
}

// The table of block checksums lies in the structure's front.
void fill_checksum_table(std::span<const std::uint64_t> checksums, std::uint64_t offset,
                         Hdf5Structure& structure) {
  if (checksums.empty()) return;
  std::memcpy(structure.front.data() + offset, checksums.data(), checksums.size_bytes());
}

// Removes the files that a larger mesh saved there before: readers would reject them together with
// the new ones.
void remove_rank_files_from(int first, const std::filesystem::path& folder) {
  std::error_code error;
  std::vector<std::filesystem::path> old;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    if (rank_of_file(it->path().filename().string()) < first) continue;
    // Keep anything else with such a name: it is not ours.
    std::error_code unknown;
    if (!it->is_symlink(unknown) && is_snapshot_file(it->path())) old.push_back(it->path());
  }
  for (const std::filesystem::path& file : old) {
    if (!error) std::filesystem::remove(file, error);
  }
  if (error) {
    throw SnapshotError("snapshot: cannot remove files of an earlier snapshot in " +
                        folder.string() + ": " + error.message());
  }
  if (!old.empty()) sync_folder(folder);
}

// Writes the parts of the structure between the data; returns their checksum.
std::uint64_t write_structure(const Hdf5Structure& structure, const std::vector<ByteRange>& ranges,
                              AtomicFile& file) {
  static constexpr std::array<std::byte, 4096> kZeros{};
  const std::uint64_t front_bytes = structure.front.size();
  RunningChecksum sum;
  for (ByteRange range : ranges) {
    while (range.begin < range.end) {
      auto bytes = std::span<const std::byte>(kZeros);
      if (range.begin < front_bytes) bytes = std::span(structure.front).subspan(range.begin);
      bytes = bytes.first(std::min<std::uint64_t>(bytes.size(), range.end - range.begin));
      sum.add(bytes);
      file.write_at(range.begin, bytes);
      range.begin += bytes.size();
    }
  }
  return sum.value();
}

}  // namespace

std::string rank_file_name(int rank) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "rank_%05d.h5", rank);
  return text.data();
}

int rank_of_file(const std::string& name) {
  constexpr std::string_view kPrefix = "rank_";
  if (!name.starts_with(kPrefix)) return -1;
  int rank = -1;
  const char* const digits = name.data() + kPrefix.size();
  const auto read = std::from_chars(digits, name.data() + name.size(), rank);
  if (read.ec != std::errc() || rank < 0) return -1;
  return rank_file_name(rank) == name ? rank : -1;
}

std::span<const std::byte> bytes_of(const ConstTensorView& view) {
  return {static_cast<const std::byte*>(view.data), view.size_in_bytes()};
}

SnapshotFileWriter SnapshotFileWriter::open(const std::filesystem::path& path,
                                            const SnapshotInfo& info,
                                            std::span<const SnapshotEntry> entries,
                                            std::span<const SnapshotState> hop_state) {
  SnapshotHeader header;
  header.info = info;
  if (!names_a_file(path) && info.replicate_size > 0 && info.shard_size > 0 &&
      info.replicate_size <= kMaxSnapshotRanks / info.shard_size) {
    header.file_count = info.replicate_size * info.shard_size;
  }
  for (const SnapshotEntry& entry : entries) header.slices.push_back(to_slice(entry));
  for (const SnapshotState& array : hop_state) header.hop_state.push_back(to_slice(array));
  for_each_slice(header, [&header](SnapshotSlice& slice) {
    slice.first_block = header.block_count;
    header.block_count += checksum_block_count(slice.data_bytes());
  });
  if (const auto fault = find_fault(header)) throw UsageError("snapshot: " + *fault);
  const std::size_t front_bytes = user_block_bytes(header);
  std::vector<std::filesystem::path> grown_folders;
  if (!names_a_file(path)) grown_folders = make_folder(path);
  SnapshotFileWriter writer(
      std::move(header), AtomicFile(names_a_file(path) ? path : path / rank_file_name(info.rank)),
      !names_a_file(path), std::move(grown_folders));
  writer.structure_ = build_hdf5_structure(writer.header_, front_bytes);
  return writer;
}

void SnapshotFileWriter::write(std::span<const std::span<const std::byte>> data) {
  std::vector<std::uint64_t> checksums;
  for (const std::span<const std::byte> bytes : data) append_block_checksums(bytes, checksums);
  fill_checksum_table(checksums, header_.checksums_offset, structure_);

  const std::string json = encode_json(header_);
  HeaderPrefix prefix;
  prefix.schema_version = schema_version(header_);
  prefix.json_bytes = static_cast<std::uint32_t>(json.size());
  prefix.file_bytes = structure_.file_bytes;
  prefix.structure_checksum = write_structure(
      structure_, structure_ranges(header_, kHeaderPrefixBytes + json.size(), prefix.file_bytes),
      file_);
  auto next = data.begin();
  for_each_slice(header_,
                 [&](const SnapshotSlice& slice) { file_.write_at(slice.data_offset, *next++); });
  file_.write_at(kHeaderPrefixBytes, std::as_bytes(std::span(json)));
  file_.write_at(0, encode_prefix(prefix, json));
  for (const std::filesystem::path& folder : grown_folders_) sync_folder(folder);
  file_.commit();
  if (in_folder_ && header_.info.rank == 0) {
    remove_rank_files_from(header_.file_count, folder_of(file_.path()));
  }
}

std::vector<std::span<const std::byte>> all_bytes(std::span<const SnapshotEntry> entries,
                                                  std::span<const SnapshotState> hop_state) {
  std::vector<std::span<const std::byte>> data;
  for (const SnapshotEntry& entry : entries) data.push_back(bytes_of(entry.data));
  for (const SnapshotState& array : hop_state) data.push_back(bytes_of(array.data));
  return data;
}

void write_snapshot_file(const std::filesystem::path& path, const SnapshotInfo& info,
                         std::span<const SnapshotEntry> entries,
                         std::span<const SnapshotState> hop_state) {
  SnapshotFileWriter::open(path, info, entries, hop_state).write(all_bytes(entries, hop_state));
}

void write_snapshot(const std::filesystem::path& path, SnapshotInfo info,
                    std::span<const SnapshotEntry> entries) {
  info.layout = "full";
  if (info.id.empty()) {
    if (!names_a_file(path) && info.replicate_size * info.shard_size > 1) {
      throw UsageError({.where = "snapshot: several files",
                        .expected = "an id that its ranks share",
                        .got = "none",
                        .remedy = "give all ranks that of one new_snapshot_id()"});
    }
    info.id = new_snapshot_id();
  }
  write_snapshot_file(path, info, entries);
}

std::string new_snapshot_id() {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::random_device device;
  std::string id;
  for (int word = 0; word < 4; ++word) {
    for (std::uint32_t bits = device(), digit = 0; digit < 8; ++digit, bits >>= 4U) {
      id += kHex[bits & 15U];
    }
  }
  return id;
}

}  // namespace hsdp
