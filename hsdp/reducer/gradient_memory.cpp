#include "hsdp/reducer/gradient_memory.h"

#include <cstddef>
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
                               SliceOwner owner, Device device, AccumulateOn accumulate_on,
                               MemoryCount count)
    : parameters_(parameters),
      layout_(layout),
      parts_(owner.parts),
      slices_(static_cast<std::size_t>(parameters.size())),
      device_(device),
      accumulate_on_(accumulate_on),
      count_(std::move(count)) {
  place_rows(owner.slice_rank());
  carry_bytes_ = result_bytes_;
  if (parts_ > 1) place_carry(owner.shard_rank);
}

// In the order of the buckets, each from a new cache line on. But slices are contiguous: a later
// window of large or whole parameters begins where the previous one ends.
void GradientMemory::place_rows(int slice_rank) {
  for (int b = 0; b < std::ssize(layout_.buckets()); ++b) {
    if (!layout_.goes_on(b)) result_bytes_ = next_aligned(result_bytes_, kAlignment);
    const Dtype dtype = hsdp::sum_dtype(layout_.buckets()[static_cast<std::size_t>(b)].wire_dtype);
    const auto element_bytes = static_cast<std::int64_t>(size_bytes(dtype));
    Place row{result_bytes_, 0, dtype};
    for (const ParameterRange& range : layout_.ranges(b, slice_rank)) {
      Place& slice = slices_[static_cast<std::size_t>(range.parameter)];
      if (slice.count == 0) slice.offset = row.offset + range.offset * element_bytes;
      slice.count += range.count;
      row.count += range.count;
    }
    rows_.push_back(row);
    result_bytes_ += row.count * element_bytes;
  }
  for (int p = 0; p < parameters_.size(); ++p) {
    slices_[static_cast<std::size_t>(p)].dtype = hsdp::sum_dtype(parameters_.wire_dtype(p));
  }
}

// Places all parts of this shard rank.
void GradientMemory::place_carry(int shard_rank) {
  carry_bytes_ = 0;
  for (int b = 0; b < std::ssize(layout_.buckets()); ++b) {
    const Dtype dtype = rows_[static_cast<std::size_t>(b)].dtype;
    const std::int64_t count = layout_.count_of(b, shard_rank * parts_, parts_);
    carry_rows_.push_back({next_aligned(carry_bytes_, kAlignment), count, dtype});
    carry_bytes_ = carry_rows_.back().offset + count * static_cast<std::int64_t>(size_bytes(dtype));
  }
}

MemoryCount::Held GradientMemory::hold(MemoryKind kind, std::size_t bytes) {
  return count_.hold(kind, static_cast<std::int64_t>(bytes));
}

void GradientMemory::allocate_carry(Communicator& replicate_group) {
  carry_ = replicate_group.allocate(carry_bytes_, Dtype::kU8);
  held_.push_back(hold(MemoryKind::kCarry, carry_.view().size_in_bytes()));
  if (parts_ == 1) return;
  result_.emplace(device_, static_cast<std::size_t>(result_bytes_));
  held_.push_back(hold(MemoryKind::kCarry, result_->size()));
}

void GradientMemory::allocate_staging(Communicator& shard_group, Reduction reduction) {
  if (shard_group.size() == 1) return;
  for (SharedMemory& slot : staging_) {
    slot = shard_group.allocate(staging_bytes(shard_group.size()) / kStagingSlots, Dtype::kU8);
    held_.push_back(hold(MemoryKind::kStaging, slot.view().size_in_bytes()));
  }
  std::vector<ReduceScatter> hops;
  for (int b = 0; b < std::ssize(layout_.buckets()); ++b) {
    ReduceScatter& hop = hops.emplace_back();
    hop.in = staging(0, b);
    hop.cut = layout_.rows(b).joined(parts_);
    hop.reduction = reduction;
  }
  shard_group.reserve(hops);
}

TensorView GradientMemory::view(const Place& place, void* memory, Device device) {
  std::byte* const data =
      memory == nullptr ? nullptr : static_cast<std::byte*>(memory) + place.offset;
  return {data, place.count, place.dtype, device};
}

TensorView GradientMemory::bucket_carry(int bucket) const {
  const std::vector<Place>& rows = carry_rows_.empty() ? rows_ : carry_rows_;
  return view(rows[static_cast<std::size_t>(bucket)], carry_.view().data, device_);
}

TensorView GradientMemory::bucket_result(int bucket) const {
  return view(rows_[static_cast<std::size_t>(bucket)], result(), device_);
}

TensorView GradientMemory::slice_result(int parameter) const {
  return view(slices_[static_cast<std::size_t>(parameter)], result(), device_);
}

void GradientMemory::require_totals() {
  if (total_) return;
  total_.emplace(device_, static_cast<std::size_t>(total_bytes()));
  total_held_ = hold(MemoryKind::kTotal, total_->size());
}

TensorView GradientMemory::bucket_total(int bucket) const {
  return view(rows_[static_cast<std::size_t>(bucket)], total_->data(), device_);
}

TensorView GradientMemory::staging(int slot, int bucket) const {
  const TensorView bytes = staging_[static_cast<std::size_t>(slot)].view();
  const Bucket& staged = layout_.buckets()[static_cast<std::size_t>(bucket)];
  return {bytes.data, staged.count, staged.wire_dtype, bytes.device};
}

Dtype GradientMemory::sum_dtype(int parameter, AccumulateDtype dtype) const {
  const Dtype own = parameters_.spec(parameter).dtype;
  return dtype == AccumulateDtype::kF32 ? hsdp::sum_dtype(own) : own;
}

// Where each accumulator begins, in bytes, and where the last one ends.
std::vector<std::int64_t> GradientMemory::accumulator_offsets(AccumulateDtype dtype) const {
  std::vector<std::int64_t> offsets{0};
  for (int p = 0; p < parameters_.size(); ++p) {
    const auto bytes = static_cast<std::int64_t>(size_bytes(sum_dtype(p, dtype)));
    offsets.push_back(next_aligned(offsets.back() + parameters_.count(p) * bytes, kAlignment));
  }
  return offsets;
}

std::int64_t GradientMemory::carry_bytes() const {
  return carry_bytes_ + (parts_ > 1 ? result_bytes_ : 0);
}

std::int64_t GradientMemory::staging_bytes(int shard_size) const {
  return shard_size == 1 ? 0 : kStagingSlots * layout_.max_bucket_bytes();
}

std::int64_t GradientMemory::accumulator_bytes(AccumulateDtype dtype) const {
  return accumulator_offsets(dtype).back();
}

bool GradientMemory::has_room(AccumulateDtype dtype) const {
  return accumulators_.size() >= static_cast<std::size_t>(accumulator_bytes(dtype));
}

void GradientMemory::require_accumulators(AccumulateDtype dtype) {
  if (!accumulator_offsets_.empty() && dtype == accumulate_dtype_) return;
  std::vector<std::int64_t> offsets = accumulator_offsets(dtype);
  if (!has_room(dtype)) {
    release_accumulators();  // before more is taken
    accumulators_ = Buffer(device_, static_cast<std::size_t>(offsets.back()),
                           accumulate_on_ == AccumulateOn::kHost ? Buffer::Place::kPinnedHost
                                                                 : Buffer::Place::kDevice);
    accumulators_held_ = hold(MemoryKind::kLocalSums, accumulators_.size());
  }
  accumulator_offsets_ = std::move(offsets);
  accumulate_dtype_ = dtype;
}

TensorView GradientMemory::accumulator(int parameter) const {
  return {accumulators_.data() + accumulator_offsets_[static_cast<std::size_t>(parameter)],
          parameters_.count(parameter), sum_dtype(parameter, accumulate_dtype_), device_};
}

void GradientMemory::release_accumulators() {
  accumulators_held_ = {};
  accumulators_ = {};
  accumulator_offsets_.clear();  // either both exist, or neither
}

void GradientMemory::release() {
  release_accumulators();
  total_held_ = {};
  total_.reset();
}

}  // namespace hsdp::reducer
