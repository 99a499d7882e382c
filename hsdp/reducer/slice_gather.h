// Fills full arrays from the slices that ranks own, in place: over the shard group, and first over
// the replicas if each replica has a part of the slices.
//
// Arrays are gathered in units: a large array by itself, straight into its memory; others together,
// in messages of at most 4 MiB, which fit into a cache, on a GPU 32 MiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/comm/communicator.h"
#include "hsdp/memory_count.h"
#include "hsdp/reducer.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/row_cut.h"

namespace hsdp::reducer {

// An array, and which of its elements each rank of the group has.
struct CutArray {
  TensorView array;  // contiguous; this rank's row is in place
  RowCut cut;
};

constexpr std::int64_t kDirectGatherBytes = std::int64_t{1} << 20;  // from here on: no copy

// Fills one array straight into its memory, several through messages that take a part of each row.
// Collective; the same arrays on every rank. Call it inside a task of `stream`. `memory` counts the
// messages. Returns the number of all-gathers: 0 in a group of one, or without elements.
std::int64_t gather_arrays(Communicator& group, std::span<const CutArray> arrays,
                           const MemoryCount& memory, Stream& stream, CallLabel label = {});

// What it allocates for messages; 0 if it gathers in place.
[[nodiscard]] std::int64_t gather_message_bytes(int group_size, std::span<const CutArray> arrays);

struct FullArray {
  int parameter = 0;
  TensorView array;  // contiguous, all elements of the parameter; this rank's slice is in place
};

// Checks the arrays against the parameters and returns them in the given order. UsageErrors begin
// with `where`. `count_of(p)`: the expected number of elements, if not the whole parameter.
[[nodiscard]] std::vector<FullArray> full_arrays(
    std::span<const ParameterSpec> parameters, std::span<const NamedArray> arrays, Device device,
    std::string_view where, const std::function<std::int64_t(int)>& count_of = {});

constexpr std::int64_t kGatherUnitBytes = std::int64_t{4} << 20;  // small arrays in one message

// Whether an array is better gathered in a message with others than by itself: a small one, and one
// that the layout has joined with others, as it may belong to a single rank. `registered`: the
// parameter's number, if it has one.
[[nodiscard]] bool shares_message(const BucketLayout& layout, std::optional<int> registered,
                                  std::int64_t size_bytes);

// This shard rank's slice of an array, and its cut into the replicas' parts.
[[nodiscard]] CutArray replica_parts(const SliceOwner& owner, const BucketLayout& layout,
                                     int parameter, TensorView shard_slice);

// Arrays that are filled together.
using GatherUnit = std::vector<FullArray>;

// Divides the arrays into units. An array of 1 MiB or more is a unit by itself; smaller ones share
// units of up to `unit_bytes`, in their order. Arrays that the layout has joined stay in one unit:
// one of them may belong to a single rank, and all others would only wait for its bytes [Note:
// gathers beside backwards]. Units are ordered by their first arrays, and leave out arrays without
// elements. They depend on layout and sizes alone, so all ranks have the same ones.
[[nodiscard]] std::vector<GatherUnit> gather_units(const BucketLayout& layout,
                                                   std::span<const FullArray> arrays,
                                                   std::int64_t unit_bytes);

// What gather_unit() gathers in each group.
struct UnitArrays {
  std::vector<CutArray> replica_parts{};  // of this shard rank's slices; empty: they are whole
  std::vector<CutArray> whole{};
};
[[nodiscard]] UnitArrays cut_unit(const SliceOwner& owner, const BucketLayout& layout,
                                  std::span<const FullArray> unit);

// The most that gather_unit() allocates for the messages of one of these units. Their arrays may be
// without memory.
[[nodiscard]] std::int64_t unit_message_bytes(const SliceOwner& owner, const BucketLayout& layout,
                                              std::span<const GatherUnit> units);

// The same for gathers of this shard rank's slices from the replicas' parts alone.
[[nodiscard]] std::int64_t parts_message_bytes(const SliceOwner& owner, const BucketLayout& layout,
                                               std::span<const GatherUnit> units);

// As gather_arrays(), on both groups.
std::int64_t gather_unit(Groups& groups, const BucketLayout& layout,
                         std::span<const FullArray> unit, const MemoryCount& memory, Stream& stream,
                         CallLabel label = {});

// The most scratch, in bytes, that gathering one of these units takes.
[[nodiscard]] std::size_t gather_scratch(const BucketLayout& layout,
                                         std::span<const GatherUnit> units);

// Gathers all units of these arrays, of kGatherUnitBytes. Returns the number of all-gathers.
[[nodiscard]] std::int64_t gather_slices(Groups& groups, const BucketLayout& layout,
                                         std::span<const FullArray> arrays,
                                         const MemoryCount& memory, Stream& stream);

}  // namespace hsdp::reducer
