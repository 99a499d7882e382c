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

namespace hsdp::reducer {
namespace {

constexpr std::int64_t kDirectBytes = std::int64_t{1} << 20;  // from here on: no copy

std::int64_t bytes_of(const TensorView& view) {
  return static_cast<std::int64_t>(view.size_in_bytes());
}

std::int64_t bytes_of(const GatherUnit& unit) {
  std::int64_t bytes = 0;
  for (const FullArray& full : unit) bytes += bytes_of(full.array);
  return bytes;
}

void gather_direct(Communicator& shard_group, const BucketLayout& layout, const FullArray& full,
                   Stream& stream) {
  const Slice own = layout.slice(full.parameter, shard_group.rank());
  shard_group.all_gather(full.array.slice(own.offset, own.count), full.array, stream,
                         layout.slices(full.parameter));
}

// Calls visit(bytes of rank r's slice in the array, their offset in the message) for each array.
template <typename Visit>
void each_slice(const BucketLayout& layout, std::span<const FullArray> unit, int rank,
                std::int64_t message_offset, Visit visit) {
  for (const FullArray& full : unit) {
    const Slice slice = layout.slice(full.parameter, rank);
    const TensorView part = full.array.slice(slice.offset, slice.count);
    visit(part, message_offset);
    message_offset += bytes_of(part);
  }
}

void gather_message(Communicator& shard_group, const BucketLayout& layout,
                    std::span<const FullArray> unit, const MemoryCount& memory, Stream& stream) {
  std::vector<std::int64_t> offsets{0};
  for (int r = 0; r < shard_group.size(); ++r) {
    std::int64_t end = offsets.back();
    each_slice(layout, unit, r, 0,
               [&end](const TensorView& part, std::int64_t) { end += bytes_of(part); });
    offsets.push_back(end);
  }
  const Scratch message(static_cast<std::size_t>(offsets.back()), stream);
  const MemoryCount::Held held = memory.hold(MemoryKind::kParameterGather, offsets.back());
  const int own = shard_group.rank();
  const std::int64_t own_begin = offsets[static_cast<std::size_t>(own)];
  each_slice(layout, unit, own, own_begin, [&](const TensorView& part, std::int64_t at) {
    copy_bytes(message.data() + at, part.data, part.size_in_bytes(), stream);
  });
  const RowCut cut(offsets);
  const TensorView out{message.data(), cut.count(), Dtype::kU8, stream.device()};
  shard_group.all_gather(out.slice(own_begin, cut.length(own)), out, stream, cut);
  for (int r = 0; r < shard_group.size(); ++r) {
    if (r == own) continue;
    each_slice(layout, unit, r, cut.begin(r), [&](const TensorView& part, std::int64_t at) {
      copy_bytes(part.data, message.data() + at, part.size_in_bytes(), stream);
    });
  }
}

}  // namespace

std::vector<FullArray> full_arrays(std::span<const ParameterSpec> parameters,
                                   std::span<const NamedArray> arrays, Device device,
                                   std::string_view where) {
  std::unordered_map<std::string_view, int> registered;
  for (const ParameterSpec& spec : parameters) {
    registered.emplace(spec.name, static_cast<int>(registered.size()));
  }
  std::vector<char> seen(parameters.size());
  std::vector<FullArray> result;
  for (const NamedArray& named : arrays) {
    const auto refuse = [&](const std::string& expected, const std::string& got) {
      throw UsageError({.where = std::string(where) + ": array of '" + named.name + "'",
                        .expected = expected,
                        .got = got});
    };
    const auto found = registered.find(named.name);
    if (found == registered.end()) refuse("a registered parameter", "an unknown one");
    const auto p = static_cast<std::size_t>(found->second);
    if (std::exchange(seen[p], 1) != 0) refuse("every parameter once", "it twice");
    const std::int64_t count = element_count(parameters[p].shape);
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
  std::vector<GatherUnit> parts;               // that may not be divided
  std::unordered_map<int, std::size_t> joins;  // bucket -> its part
  for (const FullArray& full : arrays) {
    if (full.array.count == 0) continue;
    const std::optional<int> join = layout.join_of(full.parameter);
    const auto part = join ? joins.emplace(*join, parts.size()).first->second : parts.size();
    if (part == parts.size()) parts.emplace_back();
    parts[part].push_back(full);
  }
  std::vector<GatherUnit> units;
  std::size_t small = 0;  // the unit that takes small ones, in the place of its first
  std::int64_t small_bytes = unit_bytes;
  for (GatherUnit& part : parts) {
    const std::int64_t bytes = bytes_of(part);
    if (part.size() == 1 && bytes >= kDirectBytes) {
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

void gather_unit(Communicator& shard_group, const BucketLayout& layout,
                 std::span<const FullArray> unit, const MemoryCount& memory, Stream& stream) {
  if (shard_group.size() == 1) return;
  if (unit.size() == 1) return gather_direct(shard_group, layout, unit.front(), stream);
  gather_message(shard_group, layout, unit, memory, stream);
}

std::size_t gather_scratch(const BucketLayout& layout, std::span<const GatherUnit> units) {
  if (layout.shard_size() == 1) return 0;
  std::int64_t most = 0;
  for (const GatherUnit& unit : units) {
    if (unit.size() > 1) most = std::max(most, bytes_of(unit));
  }
  return static_cast<std::size_t>(most);
}

std::int64_t gather_slices(Communicator& shard_group, const BucketLayout& layout,
                           std::span<const FullArray> arrays, const MemoryCount& memory,
                           Stream& stream) {
  if (shard_group.size() == 1) return 0;
  const std::vector<GatherUnit> units = gather_units(layout, arrays, kGatherUnitBytes);
  for (const GatherUnit& unit : units) gather_unit(shard_group, layout, unit, memory, stream);
  return std::ssize(units);
}

}  // namespace hsdp::reducer
