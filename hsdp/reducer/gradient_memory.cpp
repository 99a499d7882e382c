#include "hsdp/reducer/gradient_memory.h"

#include <iterator>
#include <utility>

namespace hsdp::reducer {
namespace {

constexpr std::int64_t kAlignment = 64;  // bytes: a cache line

std::int64_t next_aligned(std::int64_t value, std::int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

GradientMemory::GradientMemory(const ParameterTable& parameters, const BucketLayout& layout,
                               int shard_rank, Device device, AccumulateDtype accumulate_dtype,
                               MemoryCount count)
    : parameters_(parameters),
      layout_(layout),
      slices_(static_cast<std::size_t>(parameters.size())),
      device_(device),
      accumulate_dtype_(accumulate_dtype),
      count_(std::move(count)) {
  place_rows(shard_rank);
}

// In the order of the buckets, each on a cache line of its own. But a slice is one run: the later
// windows of a large parameter go on where the one before ends.
void GradientMemory::place_rows(int shard_rank) {
  constexpr auto kAlignedElements = kAlignment / static_cast<std::int64_t>(sizeof(float));
  for (int b = 0; b < std::ssize(layout_.buckets()); ++b) {
    const int parameter = layout_.buckets()[static_cast<std::size_t>(b)].parameters.front();
    const bool goes_on = layout_.buckets_of(parameter).first != b;
    if (!goes_on) carry_count_ = next_aligned(carry_count_, kAlignedElements);
    Place row{carry_count_, 0};
    for (const ParameterRange& range : layout_.ranges(b, shard_rank)) {
      Place& slice = slices_[static_cast<std::size_t>(range.parameter)];
      if (!goes_on) slice.offset = row.offset + range.offset;
      slice.count += range.count;
      row.count += range.count;
    }
    rows_.push_back(row);
    carry_count_ += row.count;
  }
}

void GradientMemory::hold(MemoryKind kind, std::size_t bytes) {
  held_.push_back(count_.hold(kind, static_cast<std::int64_t>(bytes)));
}

void GradientMemory::allocate_carry(Communicator& replicate_group) {
  carry_ = replicate_group.allocate(carry_count_, Dtype::kF32);
  hold(MemoryKind::kCarry, carry_.view().size_in_bytes());
}

void GradientMemory::allocate_staging(Communicator& shard_group) {
  if (layout_.shard_size() == 1) return;
  for (SharedMemory& slot : staging_) {
    slot = shard_group.allocate(layout_.max_bucket_bytes(), Dtype::kU8);
    hold(MemoryKind::kStaging, slot.view().size_in_bytes());
  }
}

TensorView GradientMemory::bucket_carry(int bucket) const {
  const Place& row = rows_[static_cast<std::size_t>(bucket)];
  return carry_.view().slice(row.offset, row.count);
}

TensorView GradientMemory::slice_carry(int parameter) const {
  const Place& slice = slices_[static_cast<std::size_t>(parameter)];
  return carry_.view().slice(slice.offset, slice.count);
}

void GradientMemory::require_totals() {
  if (total_) return;
  total_.emplace(device_, carry_.view().size_in_bytes());
  hold(MemoryKind::kTotal, total_->size());
}

TensorView GradientMemory::bucket_total(int bucket) const {
  const Place& row = rows_[static_cast<std::size_t>(bucket)];
  return total_->view(Dtype::kF32).slice(row.offset, row.count);
}

TensorView GradientMemory::staging(int slot, int bucket) const {
  const TensorView bytes = staging_[static_cast<std::size_t>(slot)].view();
  const Bucket& staged = layout_.buckets()[static_cast<std::size_t>(bucket)];
  return {bytes.data, staged.count, staged.wire_dtype, bytes.device};
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
    bytes = next_aligned(bytes, kAlignment);
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
