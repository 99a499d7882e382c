#include "hsdp/reducer/slice_gather.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hsdp/device/copy.h"
#include "hsdp/device/scratch.h"
#include "hsdp/error.h"
#include "hsdp/reducer/parameter_table.h"

namespace hsdp::reducer {
namespace {

std::int64_t bytes_of(const TensorView& view) {
  return static_cast<std::int64_t>(view.size_in_bytes());
}

std::int64_t bytes_of(std::span<const FullArray> unit) {
  std::int64_t bytes = 0;
  for (const FullArray& full : unit) bytes += bytes_of(full.array);
  return bytes;
}

std::int64_t bytes_of(std::span<const CutArray> arrays) {
  std::int64_t bytes = 0;
  for (const CutArray& one : arrays) bytes += bytes_of(one.array);
  return bytes;
}

void gather_direct(Communicator& group, const CutArray& one, CallLabel label, Stream& stream) {
  const int rank = group.rank();
  group.all_gather(one.array.slice(one.cut.begin(rank), one.cut.length(rank)), one.array, stream,
                   one.cut, label);
}

// The message size for units of that many bytes: what a cache holds, or on a GPU what links need.
std::int64_t message_size(std::int64_t unit_bytes, DeviceType device) {
  const std::int64_t most = std::int64_t{device == DeviceType::kHost ? 4 : 32} << 20;
  return std::min(unit_bytes, most);
}

// The part that a message takes of each row that goes on at `begin`.
std::int64_t window_of(std::span<const std::int64_t> lengths, std::int64_t begin,
                       std::int64_t message_bytes) {
  constexpr std::int64_t kAligned = 64;
  std::int64_t left = 0;
  std::int64_t going = 0;
  std::int64_t longest = 0;
  for (const std::int64_t length : lengths) {
    left += std::max<std::int64_t>(0, length - begin);
    going += length > begin ? 1 : 0;
    longest = std::max(longest, length - begin);
  }
  if (left <= message_bytes) return longest;
  return std::max(kAligned, message_bytes / std::max<std::int64_t>(going, 1) / kAligned * kAligned);
}

// The slices of one rank, one after the other.
std::vector<TensorView> row_of(std::span<const CutArray> arrays, int rank) {
  std::vector<TensorView> row;
  row.reserve(arrays.size());
  for (const CutArray& one : arrays) {
    row.push_back(one.array.slice(one.cut.begin(rank), one.cut.length(rank)));
  }
  return row;
}

// Calls visit(memory of the row, its place in the window) for the bytes from `begin` to `end`.
template <typename Visit>
void each_part(std::span<const TensorView> row, std::int64_t begin, std::int64_t end, Visit visit) {
  std::int64_t offset = 0;  // of a slice in the row
  for (const TensorView& slice : row) {
    const std::int64_t from = std::max(begin, offset);
    const std::int64_t to = std::min(end, offset + bytes_of(slice));
    if (from < to) {
      visit(static_cast<std::byte*>(slice.data) + (from - offset), from - begin,
            static_cast<std::size_t>(to - from));
    }
    offset += bytes_of(slice);
  }
}

std::int64_t gather_messages(Communicator& group, std::span<const CutArray> arrays,
                             const MemoryCount& memory, CallLabel label, Stream& stream) {
  std::vector<std::vector<TensorView>> rows;
  std::vector<std::int64_t> lengths;
  for (int r = 0; r < group.size(); ++r) {
    rows.push_back(row_of(arrays, r));
    std::int64_t& bytes = lengths.emplace_back(0);
    for (const TensorView& slice : rows.back()) bytes += bytes_of(slice);
  }
  const std::int64_t size = gather_message_bytes(group.size(), arrays);
  const Scratch message(static_cast<std::size_t>(size), stream);
  const MemoryCount::Held held = memory.hold(MemoryKind::kParameterGather, size);
  const auto own = static_cast<std::size_t>(group.rank());
  const std::int64_t longest = std::ranges::max(lengths);
  std::int64_t count = 0;
  for (std::int64_t begin = 0; begin < longest; ++count) {
    const std::int64_t end = begin + window_of(lengths, begin, size);
    std::vector<std::int64_t> offsets{0};
    for (const std::int64_t length : lengths) {
      offsets.push_back(offsets.back() + std::clamp<std::int64_t>(length - begin, 0, end - begin));
    }
    const RowCut cut(std::move(offsets));
    each_part(rows[own], begin, end,
              [&](const std::byte* part, std::int64_t at, std::size_t bytes) {
                copy_bytes(message.data() + cut.begin(group.rank()) + at, part, bytes, stream);
              });
    const TensorView out{message.data(), cut.count(), Dtype::kU8, stream.device()};
    group.all_gather(out.slice(cut.begin(group.rank()), cut.length(group.rank())), out, stream, cut,
                     label);
    for (int r = 0; r < group.size(); ++r) {
      if (r == group.rank()) continue;
      each_part(rows[static_cast<std::size_t>(r)], begin, end,
                [&](std::byte* part, std::int64_t at, std::size_t bytes) {
                  copy_bytes(part, message.data() + cut.begin(r) + at, bytes, stream);
                });
    }
    begin = end;
  }
  return count;
}

}  // namespace

std::int64_t gather_arrays(Communicator& group, std::span<const CutArray> arrays,
                           const MemoryCount& memory, Stream& stream, CallLabel label) {
  if (group.size() == 1 || bytes_of(arrays) == 0) return 0;
  if (arrays.size() > 1) return gather_messages(group, arrays, memory, label, stream);
  gather_direct(group, arrays.front(), label, stream);
  return 1;
}

std::int64_t gather_message_bytes(int group_size, std::span<const CutArray> arrays) {
  if (group_size == 1 || arrays.size() < 2) return 0;
  return message_size(bytes_of(arrays), arrays.front().array.device.type);
}

bool shares_message(const BucketLayout& layout, std::optional<int> registered,
                    std::int64_t size_bytes) {
  return size_bytes < kDirectGatherBytes || (registered && layout.join_of(*registered).has_value());
}

CutArray replica_parts(const SliceOwner& owner, const BucketLayout& layout, int parameter,
                       TensorView shard_slice) {
  const int first = owner.shard_rank * owner.parts;
  return {shard_slice, layout.slices(parameter).rows(first, owner.parts)};
}

std::vector<FullArray> full_arrays(std::span<const ParameterSpec> parameters,
                                   std::span<const NamedArray> arrays, Device device,
                                   std::string_view where,
                                   const std::function<std::int64_t(int)>& count_of) {
  std::unordered_map<std::string_view, int> registered;
  for (const ParameterSpec& spec : parameters) {
    registered.emplace(spec.name, static_cast<int>(registered.size()));
  }
  std::vector<char> seen(parameters.size());
  std::vector<FullArray> result;
  for (const NamedArray& named : arrays) {
    const auto refuse = [&](const std::string& expected, const std::string& got,
                            const std::string& remedy = {}) {
      throw UsageError({.where = std::string(where) + ": array of '" + named.name + "'",
                        .expected = expected,
                        .got = got,
                        .remedy = remedy});
    };
    const auto found = registered.find(named.name);
    if (found == registered.end()) {
      refuse("a registered parameter", "an unknown one",
             unknown_name_remedy(parameters, named.name));
    }
    const auto p = static_cast<std::size_t>(found->second);
    if (std::exchange(seen[p], 1) != 0) refuse("every parameter once", "it twice");
    const std::int64_t count =
        count_of ? count_of(found->second) : element_count(parameters[p].shape);
    const TensorView& array = named.array;
    if (array.data == nullptr && array.count > 0) refuse("memory", "a null pointer");
    if (array.count != count) {
      refuse(std::to_string(count) + " elements", std::to_string(array.count));
    }
    if (array.device != device) {
      refuse("memory on " + to_string(device) + ", the mesh's device", to_string(array.device));
    }
    result.push_back({found->second, array});
  }
  return result;
}

std::vector<GatherUnit> gather_units(const BucketLayout& layout, std::span<const FullArray> arrays,
                                     std::int64_t unit_bytes) {
  std::vector<GatherUnit> parts;               // indivisible
  std::unordered_map<int, std::size_t> joins;  // bucket -> its part
  for (const FullArray& full : arrays) {
    if (full.array.count == 0) continue;
    const std::optional<int> join = layout.join_of(full.parameter);
    const auto part = join ? joins.emplace(*join, parts.size()).first->second : parts.size();
    if (part == parts.size()) parts.emplace_back();
    parts[part].push_back(full);
  }
  std::vector<GatherUnit> units;
  std::size_t small = 0;  // the unit that takes small arrays
  std::int64_t small_bytes = unit_bytes;
  for (GatherUnit& part : parts) {
    const std::int64_t bytes = bytes_of(part);
    if (part.size() == 1 && bytes >= kDirectGatherBytes) {
      units.push_back(std::move(part));
      continue;
    }
    if (small_bytes > unit_bytes - bytes) {
      small = units.size();
      small_bytes = 0;
      units.emplace_back();
    }
    std::ranges::move(part, std::back_inserter(units[small]));
    small_bytes += bytes;
  }
  return units;
}

UnitArrays cut_unit(const SliceOwner& owner, const BucketLayout& layout,
                    std::span<const FullArray> unit) {
  UnitArrays arrays;
  for (const FullArray& full : unit) {
    arrays.whole.push_back({full.array, layout.slices(full.parameter).joined(owner.parts)});
    if (owner.parts == 1) continue;
    const RowCut& of_shards = arrays.whole.back().cut;
    TensorView shard = full.array;
    shard.count = of_shards.length(owner.shard_rank);
    if (shard.data != nullptr) {
      shard = full.array.slice(of_shards.begin(owner.shard_rank), shard.count);
    }
    arrays.replica_parts.push_back(replica_parts(owner, layout, full.parameter, shard));
  }
  return arrays;
}

std::int64_t unit_message_bytes(const SliceOwner& owner, const BucketLayout& layout,
                                std::span<const GatherUnit> units) {
  const int shard_size = layout.shard_size() / owner.parts;
  std::int64_t most = 0;
  for (const GatherUnit& unit : units) {
    const UnitArrays arrays = cut_unit(owner, layout, unit);
    most = std::max({most, gather_message_bytes(owner.parts, arrays.replica_parts),
                     gather_message_bytes(shard_size, arrays.whole)});
  }
  return most;
}

std::int64_t parts_message_bytes(const SliceOwner& owner, const BucketLayout& layout,
                                 std::span<const GatherUnit> units) {
  std::int64_t most = 0;
  for (const GatherUnit& unit : units) {
    std::vector<CutArray> parts;
    for (const FullArray& one : unit) {
      parts.push_back(replica_parts(owner, layout, one.parameter, one.array));
      parts.back().array.count = parts.back().cut.count();
    }
    most = std::max(most, gather_message_bytes(owner.parts, parts));
  }
  return most;
}

std::int64_t gather_unit(Groups& groups, const BucketLayout& layout,
                         std::span<const FullArray> unit, const MemoryCount& memory, Stream& stream,
                         CallLabel label) {
  if (layout.shard_size() == 1) return 0;
  const UnitArrays arrays = cut_unit(groups.owner(), layout, unit);
  std::int64_t count = 0;
  if (groups.parts > 1) {
    count += gather_arrays(groups.replicate, arrays.replica_parts, memory, stream, label);
  }
  return count + gather_arrays(groups.shard, arrays.whole, memory, stream, label);
}

std::size_t gather_scratch(const BucketLayout& layout, std::span<const GatherUnit> units) {
  if (layout.shard_size() == 1) return 0;
  std::int64_t most = 0;
  for (const GatherUnit& unit : units) {
    if (unit.size() == 1) continue;
    most = std::max(most, message_size(bytes_of(unit), unit.front().array.device.type));
  }
  return static_cast<std::size_t>(most);
}

std::int64_t gather_slices(Groups& groups, const BucketLayout& layout,
                           std::span<const FullArray> arrays, const MemoryCount& memory,
                           Stream& stream) {
  std::int64_t count = 0;
  for (const GatherUnit& unit : gather_units(layout, arrays, kGatherUnitBytes)) {
    count += gather_unit(groups, layout, unit, memory, stream);
  }
  return count;
}

}  // namespace hsdp::reducer
