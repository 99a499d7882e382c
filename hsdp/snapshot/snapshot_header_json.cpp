#include <limits>
#include <nlohmann/json.hpp>

#include "hsdp/error.h"
#include "hsdp/snapshot/block_checksums.h"
#include "hsdp/snapshot/snapshot_header.h"

namespace hsdp {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// The format nests objects in the list of parameters, and shapes in those objects.
constexpr int kMaxDepth = 4;

const json& field(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) throw SnapshotError(std::string("header lacks '") + key + "'");
  return *found;
}

[[noreturn]] void refuse(const char* key) {
  throw SnapshotError(std::string("header has an impossible '") + key + "'");
}

std::int64_t whole(const json& value, const char* key, std::int64_t low, std::int64_t high) {
  if (!value.is_number_integer()) refuse(key);
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) {
    refuse(key);
  }
  const auto number = value.get<std::int64_t>();
  if (number < low || number > high) refuse(key);
  return number;
}

std::int64_t get_whole(const json& object, const char* key, std::int64_t low = 0,
                       std::int64_t high = std::numeric_limits<std::int64_t>::max()) {
  return whole(field(object, key), key, low, high);
}

double get_number(const json& object, const char* key) {
  const json& value = field(object, key);
  if (!value.is_number()) refuse(key);
  return value.get<double>();
}

std::string get_text(const json& object, const char* key) {
  const json& value = field(object, key);
  if (!value.is_string()) refuse(key);
  return value.get<std::string>();
}

bool get_flag(const json& object, const char* key) {
  const json& value = field(object, key);
  if (!value.is_boolean()) refuse(key);
  return value.get<bool>();
}

Dtype get_dtype(const json& object, const char* key) {
  try {
    return parse_dtype(get_text(object, key));
  } catch (const UsageError&) {
    refuse(key);
  }
}

SnapshotInfo decode_info(const json& root) {
  SnapshotInfo info;
  info.id = get_text(root, "id");
  if (root.contains("reducer")) info.reducer = get_text(root, "reducer");
  info.step = get_whole(root, "step", std::numeric_limits<std::int64_t>::min());
  info.replicate_size = static_cast<int>(get_whole(root, "replicate_size", 1, kMaxSnapshotRanks));
  info.shard_size = static_cast<int>(get_whole(root, "shard_size", 1, kMaxSnapshotRanks));
  info.rank = static_cast<int>(get_whole(root, "rank", 0, kMaxSnapshotRanks));
  info.microbatch_count = get_whole(root, "microbatch_count");
  info.divide_factor = get_number(root, "divide_factor");
  info.loss_scale = get_number(root, "loss_scale");
  if (get_text(root, "replica_dtype") != kOwnDtype) {
    info.replica_dtype = get_dtype(root, "replica_dtype");
  }
  info.replica_hop = get_text(root, "replica_hop");
  info.reduction = get_text(root, "reduction");
  info.layout = get_text(root, "layout");
  info.engine = get_text(root, "engine");
  info.partial = get_flag(root, "partial");
  info.quantizes = root.contains("quantizes") && get_flag(root, "quantizes");
  return info;
}

SnapshotSlice decode_slice(const json& object) {
  if (!object.is_object()) refuse("parameters");
  SnapshotSlice slice;
  slice.name = get_text(object, "name");
  const json& shape = field(object, "shape");
  if (!shape.is_array() || shape.size() > kMaxDimensions) refuse("shape");
  for (const json& extent : shape) {
    slice.shape.push_back(whole(extent, "shape", 0, std::numeric_limits<std::int64_t>::max()));
  }
  slice.dtype = get_dtype(object, "dtype");
  slice.reduce_dtype = get_dtype(object, "reduce_dtype");
  slice.data_dtype = get_dtype(object, "data_dtype");
  slice.offset = get_whole(object, "offset");
  slice.count = get_whole(object, "count");
  slice.data_offset = static_cast<std::uint64_t>(get_whole(object, "data_offset"));
  return slice;
}

SnapshotSlice decode_state(const json& object) {
  if (!object.is_object()) refuse("hop_state");
  SnapshotSlice array;
  array.name = get_text(object, "key");
  array.data_dtype = get_dtype(object, "dtype");
  array.count = get_whole(object, "count");
  array.shape = {array.count};
  array.data_offset = static_cast<std::uint64_t>(get_whole(object, "data_offset"));
  return array;
}

json parse(std::string_view text) {
  const json::parser_callback_t bound_depth = [](int depth, json::parse_event_t, json&) {
    if (depth > kMaxDepth) throw SnapshotError("header nests too deeply");
    return true;
  };
  try {
    json root = json::parse(text, bound_depth);
    if (!root.is_object()) throw SnapshotError("header is no JSON object");
    return root;
  } catch (const json::exception&) {
    throw SnapshotError("header is not valid JSON");
  }
}

// Checks that data and checksum table lie inside the file; block numbers follow from the order.
void place_blocks(SnapshotHeader& header, std::uint64_t file_bytes) {
  for_each_slice(header, [&](SnapshotSlice& slice) {
    slice.first_block = header.block_count;
    const std::uint64_t bytes = slice.data_bytes();
    if (slice.data_offset > file_bytes || bytes > file_bytes - slice.data_offset) {
      throw SnapshotError("data of '" + printable(slice.name) + "' lies outside of the file");
    }
    header.block_count += checksum_block_count(bytes);
  });
  const std::uint64_t table_bytes = header.block_count * sizeof(std::uint64_t);
  if (header.checksums_offset > file_bytes || table_bytes > file_bytes - header.checksums_offset) {
    throw SnapshotError("the checksum table lies outside of the file");
  }
}

ordered_json to_json(const SnapshotSlice& slice) {
  return {{"name", slice.name},
          {"shape", slice.shape},
          {"dtype", name(slice.dtype)},
          {"reduce_dtype", name(slice.reduce_dtype)},
          {"data_dtype", name(slice.data_dtype)},
          {"offset", slice.offset},
          {"count", slice.count},
          {"data_offset", slice.data_offset}};
}

ordered_json state_json(const SnapshotSlice& array) {
  return {{"key", array.name},
          {"dtype", name(array.data_dtype)},
          {"count", array.count},
          {"data_offset", array.data_offset}};
}

}  // namespace

bool is_snapshot_text(const std::string& text) {
  try {
    static_cast<void>(json(text).dump());
    return true;
  } catch (const json::exception&) {
    return false;
  }
}

// One line for the run and one per parameter, so that people can read a file's head.
std::string encode_json(const SnapshotHeader& header) {
  const SnapshotInfo& info = header.info;
  ordered_json root{{"id", info.id},
                    {"step", info.step},
                    {"replicate_size", info.replicate_size},
                    {"shard_size", info.shard_size},
                    {"rank", info.rank},
                    {"file_count", header.file_count},
                    {"microbatch_count", info.microbatch_count},
                    {"divide_factor", info.divide_factor},
                    {"loss_scale", info.loss_scale},
                    {"replica_dtype", replica_dtype_text(info)},
                    {"replica_hop", info.replica_hop},
                    {"quantizes", info.quantizes},
                    {"reduction", info.reduction},
                    {"layout", info.layout},
                    {"engine", info.engine},
                    {"partial", info.partial},
                    {"checksum_block_bytes", kChecksumBlockBytes},
                    {"checksums_offset", header.checksums_offset}};
  if (!info.reducer.empty()) root["reducer"] = info.reducer;
  try {
    std::string text = root.dump();
    text.back() = ',';  // the object continues
    text += "\n\"parameters\":[";
    for (std::size_t i = 0; i < header.slices.size(); ++i) {
      text += (i == 0 ? "\n" : ",\n") + to_json(header.slices[i]).dump();
    }
    if (!header.hop_state.empty()) text += "\n],\"hop_state\":[";
    for (std::size_t i = 0; i < header.hop_state.size(); ++i) {
      text += (i == 0 ? "\n" : ",\n") + state_json(header.hop_state[i]).dump();
    }
    return text + "\n]}\n";
  } catch (const json::exception&) {
    throw UsageError("snapshot: names must be valid UTF-8");
  }
}

SnapshotHeader decode_json(std::string_view text, std::uint64_t file_bytes) {
  const json root = parse(text);
  SnapshotHeader header;
  header.info = decode_info(root);
  header.file_count = static_cast<int>(get_whole(root, "file_count", 1, kMaxSnapshotRanks));
  if (get_whole(root, "checksum_block_bytes") != std::int64_t{kChecksumBlockBytes}) {
    refuse("checksum_block_bytes");
  }
  header.checksums_offset = static_cast<std::uint64_t>(get_whole(root, "checksums_offset"));
  const json& parameters = field(root, "parameters");
  if (!parameters.is_array()) refuse("parameters");
  header.slices.reserve(parameters.size());
  for (const json& parameter : parameters) header.slices.push_back(decode_slice(parameter));
  if (root.contains("hop_state")) {
    const json& arrays = field(root, "hop_state");
    if (!arrays.is_array()) refuse("hop_state");
    for (const json& array : arrays) header.hop_state.push_back(decode_state(array));
  }
  if (const auto fault = find_fault(header)) throw SnapshotError("impossible header: " + *fault);
  place_blocks(header, file_bytes);
  return header;
}

}  // namespace hsdp
