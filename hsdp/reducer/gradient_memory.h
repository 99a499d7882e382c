// The memory of one Reducer: the carry, which also is the result (fp32, or f64 for f64 gradients),
// mid-step totals, two staging buckets, and the full-size accumulators of sync = none. Totals and
// accumulators are allocated on first need. With results sharded over the mesh, the result is
// smaller than the carry and has separate memory.
//
// The carry is allocated from the replicate group and staging from the shard group, so that peers
// on the host read them directly. Not thread-safe, except for the views, which never move.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "hsdp/bucket_layout.h"
#include "hsdp/comm/communicator.h"
#include "hsdp/device/buffer.h"
#include "hsdp/memory_count.h"
#include "hsdp/reducer/groups.h"
#include "hsdp/reducer/parameter_table.h"

namespace hsdp::reducer {

constexpr int kStagingSlots = 2;
constexpr int kNoSlot = -1;  // of a bucket that is not staged

// kAhead: the next bucket is packed while one is reduced, in two slots. kInTurn: it is packed after
// that one, into the same slot, and reduced from the cache.
enum class PackOrder : std::uint8_t { kAhead, kInTurn };

inline int slot_count(PackOrder order) { return order == PackOrder::kAhead ? kStagingSlots : 1; }

class GradientMemory {
 public:
  // Allocates nothing yet. Parameters and layout outlive it.
  GradientMemory(const ParameterTable& parameters, const BucketLayout& layout, SliceOwner owner,
                 Device device, AccumulateOn accumulate_on, MemoryCount count);
  // Each is collective over its group, once, before anything else.
  void allocate_carry(Communicator& replicate_group);
  void allocate_staging(Communicator& shard_group, Reduction reduction);

  // What each allocation takes. carry_bytes() includes the result, staging_bytes() both slots.
  [[nodiscard]] std::int64_t carry_bytes() const;
  [[nodiscard]] std::int64_t staging_bytes(int shard_size) const;
  [[nodiscard]] std::int64_t total_bytes() const { return result_bytes_; }
  [[nodiscard]] std::int64_t accumulator_bytes(AccumulateDtype dtype) const;

  // This rank's row of a bucket in the carry. Has sum_dtype(), as do results. Views have no address
  // before allocate_carry().
  [[nodiscard]] TensorView bucket_carry(int bucket) const;
  // This rank's result of a bucket, and of a parameter's slice, which is contiguous.
  [[nodiscard]] TensorView bucket_result(int bucket) const;
  [[nodiscard]] TensorView slice_result(int parameter) const;

  // Replica-summed totals of groups with sync = all before the step's end. Call require_totals()
  // first, before tasks are launched.
  void require_totals();
  [[nodiscard]] TensorView bucket_total(int bucket) const;

  // The slot's memory as the bucket's wire elements.
  [[nodiscard]] TensorView staging(int slot, int bucket) const;

  // The local accumulator of a whole parameter. Call require_accumulators() first; it keeps the
  // sums only if they already have that dtype. No task may use them while it allocates.
  [[nodiscard]] bool has_room(AccumulateDtype dtype) const;
  void require_accumulators(AccumulateDtype dtype);
  [[nodiscard]] AccumulateDtype accumulate_dtype() const { return accumulate_dtype_; }
  [[nodiscard]] TensorView accumulator(int parameter) const;

  // Frees what was allocated on first need. No task may use it any more.
  void release();

 private:
  // A run of elements of the carry.
  struct Place {
    std::int64_t offset = 0;  // bytes
    std::int64_t count = 0;
    Dtype dtype = Dtype::kF32;
  };
  [[nodiscard]] static TensorView view(const Place& place, void* memory, Device device);
  void place_rows(int slice_rank);
  void place_carry(int shard_rank);
  [[nodiscard]] void* result() const { return result_ ? result_->data() : carry_.view().data; }
  [[nodiscard]] MemoryCount::Held hold(MemoryKind kind, std::size_t bytes);
  [[nodiscard]] Dtype sum_dtype(int parameter, AccumulateDtype dtype) const;
  [[nodiscard]] std::vector<std::int64_t> accumulator_offsets(AccumulateDtype dtype) const;
  void release_accumulators();

  const ParameterTable& parameters_;
  const BucketLayout& layout_;
  const int parts_;
  std::vector<Place> rows_;    // in this rank's result, [bucket]
  std::vector<Place> slices_;  // in this rank's result, [parameter]
  std::int64_t result_bytes_ = 0;
  std::vector<Place> carry_rows_;  // [bucket]; empty: as rows_
  std::int64_t carry_bytes_ = 0;
  Device device_;
  AccumulateOn accumulate_on_;
  AccumulateDtype accumulate_dtype_ = AccumulateDtype::kF32;
  SharedMemory carry_;
  std::optional<Buffer> result_;  // if it is not the carry
  std::array<SharedMemory, kStagingSlots> staging_;
  std::optional<Buffer> total_;  // tasks read it; may be of no bytes
  Buffer accumulators_;
  std::vector<std::int64_t> accumulator_offsets_;  // bytes
  MemoryCount count_;
  std::vector<MemoryCount::Held> held_;  // until the end
  MemoryCount::Held total_held_;
  MemoryCount::Held accumulators_held_;
};

}  // namespace hsdp::reducer
