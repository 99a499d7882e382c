// Fills full arrays from the slices that ranks own, in place: over the shard group, and where each
// replica has its part of those, over the replicas first.
//
// Arrays are gathered in units: a large array by itself, straight into its memory; others together,
// in messages of at most 4 MiB, which a cache holds, on a GPU 32 MiB.
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

// An array and which elements of it each rank of the group has.
struct CutArray {
  TensorView array;  // contiguous; this rank's row is in place
  RowCut cut;
};

constexpr std::int64_t kDirectGatherBytes = std::int64_t{1} << 20;  // from here on: no copy

// Fills one array straight into its memory, several in messages that take a part of each row.
// Collective; the same arrays on every rank. Call it inside a task of `stream`. `memory` counts the
// messages. Returns the number of all-gathers: none in a group of one, or of no elements.
std::int64_t gather_arrays(Communicator& group, std::span<const CutArray> arrays,
                           const MemoryCount& memory, Stream& stream, CallLabel label = {});

// What it takes for its messages: none where it gathers in place.
[[nodiscard]] std::int64_t gather_message_bytes(int group_size, std::span<const CutArray> arrays);

struct FullArray {
  int parameter = 0;
  TensorView array;  // contiguous, all elements of the parameter; this rank's slice is in place
};

// Checks the arrays against the parameters: in their order. UsageError that begins with `where`.
// `count_of` a parameter's number: the elements of its array, where that is not all of them.
[[nodiscard]] std::vector<FullArray> full_arrays(
    std::span<const ParameterSpec> parameters, std::span<const NamedArray> arrays, Device device,
    std::string_view where, const std::function<std::int64_t(int)>& count_of = {});

constexpr std::int64_t kGatherUnitBytes = std::int64_t{4} << 20;  // small arrays in one message

// Whether an array of a unit is better gathered in a message with others than by itself: small ones
// are, and what the layout has joined, as one of those may be a single rank's. `registered`: the
// parameter's number, if it has one.
[[nodiscard]] bool shares_message(const BucketLayout& layout, std::optional<int> registered,
                                  std::int64_t size_bytes);

// Of an array, this shard rank's slice and how the replicas have it in parts.
[[nodiscard]] CutArray replica_parts(const SliceOwner& owner, const BucketLayout& layout,
                                     int parameter, TensorView shard_slice);

// What is filled together.
using GatherUnit = std::vector<FullArray>;

// Divides the arrays into units: an array of 1 MiB or more is one by itself, smaller ones share
// one up to `unit_bytes`, in their order. Arrays that the layout has joined before it cut them are
// never divided: one of them may be a single rank's, and all others would only wait for its bytes
// [Note: gathers beside backwards]. Units are in the order of their first arrays: the small
// ones between large ones wait for none that comes later. Arrays without elements are in none.
// Depends on layout and sizes alone, so all ranks have the same units.
[[nodiscard]] std::vector<GatherUnit> gather_units(const BucketLayout& layout,
                                                   std::span<const FullArray> arrays,
                                                   std::int64_t unit_bytes);

// What gather_unit() gathers in each group.
struct UnitArrays {
  std::vector<CutArray> replica_parts{};  // of this shard rank's slices; none: they are whole
  std::vector<CutArray> whole{};
};
[[nodiscard]] UnitArrays cut_unit(const SliceOwner& owner, const BucketLayout& layout,
                                  std::span<const FullArray> unit);

// What gather_unit() takes for messages at most, for any one of these; their arrays need no memory.
[[nodiscard]] std::int64_t unit_message_bytes(const SliceOwner& owner, const BucketLayout& layout,
                                              std::span<const GatherUnit> units);

// The same where the replicas' parts of this shard rank's slices are gathered, and no more.
[[nodiscard]] std::int64_t parts_message_bytes(const SliceOwner& owner, const BucketLayout& layout,
                                               std::span<const GatherUnit> units);

// As gather_arrays(), on both groups.
std::int64_t gather_unit(Groups& groups, const BucketLayout& layout,
                         std::span<const FullArray> unit, const MemoryCount& memory, Stream& stream,
                         CallLabel label = {});

// The scratch that gathering any one of these takes, in bytes.
[[nodiscard]] std::size_t gather_scratch(const BucketLayout& layout,
                                         std::span<const GatherUnit> units);

// All units of these arrays, of kGatherUnitBytes. Returns the number of all-gathers it took.
[[nodiscard]] std::int64_t gather_slices(Groups& groups, const BucketLayout& layout,
                                         std::span<const FullArray> arrays,
                                         const MemoryCount& memory, Stream& stream);

}  // namespace hsdp::reducer
