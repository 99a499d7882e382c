#include "hsdp/reducer/gradient_memory.h"

#include <utility>

namespace hsdp::reducer {
namespace {

constexpr std::int64_t kAccumulatorAlignment = 64;  // bytes: a cache line

}  // namespace

GradientMemory::GradientMemory(const ParameterTable& parameters, const BucketLayout& layout,
                               int shard_rank, Device device, AccumulateDtype accumulate_dtype,
                               MemoryCount count)
    : parameters_(parameters),
      layout_(layout),
      shard_rank_(shard_rank),
      device_(device),
      accumulate_dtype_(accumulate_dtype),
      count_(std::move(count)) {}

void GradientMemory::hold(MemoryKind kind, std::size_t bytes) {
  held_.push_back(count_.hold(kind, static_cast<std::int64_t>(bytes)));
}

void GradientMemory::allocate_carry(Communicator& replicate_group) {
  carry_ = replicate_group.allocate(layout_.shard_count(shard_rank_), Dtype::kF32);
  hold(MemoryKind::kCarry, carry_.view().size_in_bytes());
}

void GradientMemory::allocate_staging(Communicator& shard_group) {
  if (layout_.shard_size() == 1) return;
  for (SharedMemory& slot : staging_) {
    slot = shard_group.allocate(layout_.max_bucket_bytes(), Dtype::kU8);
    hold(MemoryKind::kStaging, slot.view().size_in_bytes());
  }
}

TensorView GradientMemory::carry(const Bucket& bucket) const {
  return carry_.view().slice(bucket.shard_offsets[static_cast<std::size_t>(shard_rank_)],
                             bucket.rows.length(shard_rank_));
}

TensorView GradientMemory::carry(const ShardSlice& slice) const {
  return carry_.view().slice(slice.shard_offset, slice.count);
}

void GradientMemory::require_totals() {
  if (total_) return;
  total_.emplace(device_, carry_.view().size_in_bytes());
  hold(MemoryKind::kTotal, total_->size());
}

TensorView GradientMemory::total(const Bucket& bucket) const {
  return total_->view(Dtype::kF32)
      .slice(bucket.shard_offsets[static_cast<std::size_t>(shard_rank_)],
             bucket.rows.length(shard_rank_));
}

TensorView GradientMemory::staging(int slot, const Bucket& bucket) const {
  const TensorView bytes = staging_[static_cast<std::size_t>(slot)].view();
  return {bytes.data, bucket.rows.count(), bucket.wire_dtype, bytes.device};
}

void GradientMemory::require_accumulators() {
  if (!accumulator_offsets_.empty()) return;
  std::vector<std::int64_t> offsets;
  std::int64_t bytes = 0;
  for (int p = 0; p < parameters_.size(); ++p) {
    offsets.push_back(bytes);
    const Dtype dtype =
        accumulate_dtype_ == AccumulateDtype::kF32 ? Dtype::kF32 : parameters_.spec(p).dtype;
    bytes += parameters_.count(p) * static_cast<std::int64_t>(size_bytes(dtype));
    bytes += (kAccumulatorAlignment - bytes % kAccumulatorAlignment) % kAccumulatorAlignment;
  }
  accumulators_ = Buffer(device_, static_cast<std::size_t>(bytes));
  hold(MemoryKind::kLocalSums, accumulators_.size());
  accumulator_offsets_ = std::move(offsets);  // there is no memory without them, nor the reverse
}

TensorView GradientMemory::accumulator(int parameter) const {
  const Dtype dtype =
      accumulate_dtype_ == AccumulateDtype::kF32 ? Dtype::kF32 : parameters_.spec(parameter).dtype;
  return {accumulators_.data() + accumulator_offsets_[static_cast<std::size_t>(parameter)],
          parameters_.count(parameter), dtype, device_};
}

}  // namespace hsdp::reducer
