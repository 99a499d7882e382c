#include "hsdp/snapshot/snapshot_header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>
#include <unordered_set>

#include "hsdp/divide_factors.h"
#include "hsdp/error.h"
#include "hsdp/snapshot/block_checksums.h"

namespace hsdp {
namespace {

static_assert(std::endian::native == std::endian::little, "snapshots are little-endian");

// Keeps byte counts and their sums far from overflow.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 58;

template <class T>
void store(PrefixBytes& bytes, std::size_t position, T value) {
  std::memcpy(bytes.data() + position, &value, sizeof value);
}

template <class T>
T load(std::span<const std::byte> bytes, std::size_t position) {
  T value;
  std::memcpy(&value, bytes.data() + position, sizeof value);
  return value;
}

PrefixBytes encode_unsealed(const HeaderPrefix& prefix) {
  PrefixBytes bytes{};
  std::memcpy(bytes.data(), kSnapshotMagic.data(), kSnapshotMagic.size());
  store(bytes, 8, prefix.schema_version);
  store(bytes, 12, prefix.json_bytes);
  store(bytes, 16, prefix.file_bytes);
  store(bytes, 24, prefix.structure_checksum);
  return bytes;
}

std::optional<std::int64_t> bounded_count(const Shape& shape) {
  std::int64_t count = 1;
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent < 0 || extent > kMaxElements) return std::nullopt;
    empty = empty || extent == 0;
  }
  if (empty) return 0;
  for (const std::int64_t extent : shape) {
    if (count > kMaxElements / extent) return std::nullopt;
    count *= extent;
  }
  return count;
}

std::optional<std::string> find_info_fault(const SnapshotHeader& header) {
  const SnapshotInfo& info = header.info;
  const auto short_text = [](const std::string& text) {
    return !text.empty() && text.size() < 128;
  };
  if (!short_text(info.id)) return "id must have 1 to 127 bytes";
  if (info.reducer.size() >= 128) return "reducer must have at most 127 bytes";
  if (info.replicate_size < 1 || info.shard_size < 1 ||
      info.replicate_size > kMaxSnapshotRanks / info.shard_size) {
    return "impossible mesh " + std::to_string(info.replicate_size) + "x" +
           std::to_string(info.shard_size);
  }
  const int world_size = info.replicate_size * info.shard_size;
  if (info.rank < 0 || info.rank >= world_size) {
    return "rank " + std::to_string(info.rank) + " of " + std::to_string(world_size);
  }
  if (header.file_count != 1 && header.file_count != world_size) {
    return "expected 1 or " + std::to_string(world_size) + " files, got " +
           std::to_string(header.file_count);
  }
  if (info.microbatch_count < 0) return "negative microbatch count";
  if (!std::isfinite(info.divide_factor) || !std::isfinite(info.loss_scale) ||
      info.loss_scale <= 0 || !is_usable_divisor(info.divide_factor, info.loss_scale)) {
    return "divide factor and loss scale must be finite, the scale positive, and their product one "
           "that fp32 and its reciprocal hold";
  }
  constexpr std::array<std::string_view, 4> kLayouts{"flat", "dim0", "whole", "full"};
  if (std::ranges::find(kLayouts, info.layout) == kLayouts.end()) {
    return "layout must be flat, dim0, whole or full, got '" + printable(info.layout) + "'";
  }
  if (info.layout != "full" && header.file_count != world_size) {
    return "a sharded layout has one file per rank: write to a directory";
  }
  if (info.layout == "full" && info.partial && world_size != 1) {
    return "a partial needs one file per rank and a sharded layout";
  }
  if (!short_text(info.replica_hop) || !short_text(info.reduction) || !short_text(info.engine)) {
    return "replica_hop, reduction and engine must have 1 to 127 bytes";
  }
  return std::nullopt;
}

std::optional<std::string> find_slice_fault(const SnapshotSlice& slice, bool full) {
  if (slice.name.empty() || slice.name.size() > kMaxNameBytes) {
    return "a parameter name must have 1 to " + std::to_string(kMaxNameBytes) + " bytes";
  }
  const std::string where = "parameter '" + printable(slice.name) + "': ";
  if (slice.shape.size() > kMaxDimensions) {
    return where + "more than " + std::to_string(kMaxDimensions) + " dimensions";
  }
  const std::optional<std::int64_t> count = bounded_count(slice.shape);
  if (!count) return where + "impossible shape " + to_string(slice.shape);
  if (slice.offset < 0 || slice.count < 0 || slice.offset > *count ||
      slice.count > *count - slice.offset) {
    return where + "slice [" + std::to_string(slice.offset) + ", +" + std::to_string(slice.count) +
           ") outside of " + std::to_string(*count) + " elements";
  }
  if (full && slice.count != *count) return where + "a full layout holds whole parameters";
  if (!is_gradient_dtype(slice.data_dtype)) {
    return where + "data must be f32, bf16, f16 or f64, got " + std::string(name(slice.data_dtype));
  }
  return std::nullopt;
}

std::optional<std::string> find_state_fault(const SnapshotSlice& array) {
  if (array.name.empty() || array.name.size() > kMaxNameBytes) {
    return "a key of the hop's state must have 1 to " + std::to_string(kMaxNameBytes) + " bytes";
  }
  const std::string where = "hop state '" + printable(array.name) + "': ";
  if (array.count < 0 || array.count > kMaxElements) {
    return where + "impossible count " + std::to_string(array.count);
  }
  switch (array.data_dtype) {
    case Dtype::kF32:
    case Dtype::kF64:
    case Dtype::kI64:
    case Dtype::kU8:
      return std::nullopt;
    default:
      return where + "data must be f32, f64, i64 or u8, got " + std::string(name(array.data_dtype));
  }
}

}  // namespace

std::string replica_dtype_text(const SnapshotInfo& info) {
  return std::string(info.replica_dtype ? name(*info.replica_dtype) : kOwnDtype);
}

std::string printable(std::string_view text, std::size_t max_bytes) {
  std::string result(text.substr(0, max_bytes));
  for (char& c : result) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  // C1 controls are the UTF-8 pairs C2 80..9F.
  for (std::size_t i = 0; i + 1 < result.size(); ++i) {
    if (result[i] == '\xc2' && static_cast<unsigned char>(result[i + 1]) < 0xa0) {
      result[i] = result[i + 1] = '?';
    }
  }
  if (text.size() > max_bytes) {
    while (!result.empty() && (static_cast<unsigned char>(text[result.size()]) & 0xc0U) == 0x80U) {
      result.pop_back();  // never half a character
    }
    result += "...";
  }
  return result;
}

std::optional<std::string> find_fault(const SnapshotHeader& header) {
  if (auto fault = find_info_fault(header)) return fault;
  std::unordered_set<std::string_view> names;
  for (const SnapshotSlice& slice : header.slices) {
    if (auto fault = find_slice_fault(slice, header.info.layout == "full")) return fault;
    if (!names.insert(slice.name).second) {
      return "parameter '" + printable(slice.name) + "' occurs twice";
    }
  }
  std::unordered_set<std::string_view> keys;
  for (const SnapshotSlice& array : header.hop_state) {
    if (auto fault = find_state_fault(array)) return fault;
    if (!keys.insert(array.name).second) {
      return "hop state '" + printable(array.name) + "' occurs twice";
    }
  }
  return std::nullopt;
}

std::uint64_t header_checksum(const HeaderPrefix& prefix, std::string_view json) {
  const PrefixBytes bytes = encode_unsealed(prefix);
  RunningChecksum sum;
  sum.add(std::span(bytes).first(kHeaderPrefixBytes - sizeof prefix.header_checksum));
  sum.add(std::as_bytes(std::span(json)));
  return sum.value();
}

PrefixBytes encode_prefix(HeaderPrefix prefix, std::string_view json) {
  PrefixBytes bytes = encode_unsealed(prefix);
  store(bytes, 32, header_checksum(prefix, json));
  return bytes;
}

HeaderPrefix decode_prefix(std::span<const std::byte> bytes) {
  constexpr std::string_view kHdf5Magic = "\x89HDF\r\n\x1a\n";
  const auto starts_with = [&](std::string_view magic) {
    return bytes.size() >= magic.size() &&
           std::memcmp(bytes.data(), magic.data(), magic.size()) == 0;
  };
  if (starts_with(kHdf5Magic)) throw SnapshotError("an HDF5 file, but not a snapshot of hsdp");
  if (!starts_with(kSnapshotMagic)) throw SnapshotError("not a snapshot of hsdp");
  if (bytes.size() < kHeaderPrefixBytes) throw SnapshotError("truncated in its header");
  HeaderPrefix prefix;
  prefix.schema_version = load<std::uint32_t>(bytes, 8);
  prefix.json_bytes = load<std::uint32_t>(bytes, 12);
  prefix.file_bytes = load<std::uint64_t>(bytes, 16);
  prefix.structure_checksum = load<std::uint64_t>(bytes, 24);
  prefix.header_checksum = load<std::uint64_t>(bytes, 32);
  if (prefix.schema_version < 1 || prefix.schema_version > kSnapshotSchemaVersion) {
    throw SnapshotError("unsupported schema version: expected 1 to " +
                        std::to_string(kSnapshotSchemaVersion) + ", got " +
                        std::to_string(prefix.schema_version) +
                        "; use the release of hsdp that wrote it");
  }
  return prefix;
}

std::vector<ByteRange> structure_ranges(const SnapshotHeader& header, std::uint64_t header_bytes,
                                        std::uint64_t file_bytes) {
  std::vector<ByteRange> data;
  for_each_slice(header, [&data](const SnapshotSlice& slice) {
    if (slice.count != 0)
      data.push_back({slice.data_offset, slice.data_offset + slice.data_bytes()});
  });
  std::sort(data.begin(), data.end(),
            [](const ByteRange& x, const ByteRange& y) { return x.begin < y.begin; });
  data.push_back({file_bytes, file_bytes});
  std::vector<ByteRange> structure;
  std::uint64_t position = header_bytes;
  for (const ByteRange& range : data) {
    if (range.begin < position) throw SnapshotError("data ranges overlap");
    if (range.begin > position) structure.push_back({position, range.begin});
    position = range.end;
  }
  const ByteRange table{header.checksums_offset,
                        header.checksums_offset + header.block_count * sizeof(std::uint64_t)};
  const auto holds_table = [&](const ByteRange& range) {
    return range.begin <= table.begin && table.end <= range.end;
  };
  if (header.block_count != 0 && std::none_of(structure.begin(), structure.end(), holds_table)) {
    throw SnapshotError("the checksum table overlaps the data");
  }
  return structure;
}

}  // namespace hsdp
