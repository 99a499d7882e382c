#include "hsdp/reducer/slice_gather.h"

#include <cstddef>
#include <vector>

#include "hsdp/device/copy.h"
#include "hsdp/device/scratch.h"

namespace hsdp::reducer {
namespace {

constexpr std::size_t kDirectBytes = std::size_t{1} << 20;  // from here on: no copy
constexpr std::size_t kBatchBytes = std::size_t{4} << 20;   // small arrays in one message

void gather_direct(Communicator& shard_group, const BucketLayout& layout, const FullArray& full,
                   Stream& stream) {
  const ShardSlice& own = layout.slice(full.parameter, shard_group.rank());
  shard_group.all_gather(full.array.slice(own.flat_offset, own.count), full.array, stream,
                         layout.slices(full.parameter));
}

// Calls visit(bytes of rank r's slice in the array, their offset in the message) for all arrays.
template <typename Visit>
void each_slice(const BucketLayout& layout, std::span<const FullArray> batch, int rank,
                std::int64_t message_offset, Visit visit) {
  for (const FullArray& full : batch) {
    const ShardSlice& slice = layout.slice(full.parameter, rank);
    const TensorView part = full.array.slice(slice.flat_offset, slice.count);
    visit(part, message_offset);
    message_offset += static_cast<std::int64_t>(part.size_in_bytes());
  }
}

void gather_batch(Communicator& shard_group, const BucketLayout& layout,
                  std::span<const FullArray> batch, Stream& stream) {
  std::vector<std::int64_t> offsets{0};
  for (int r = 0; r < shard_group.size(); ++r) {
    std::int64_t end = offsets.back();
    each_slice(layout, batch, r, 0, [&end](const TensorView& part, std::int64_t) {
      end += static_cast<std::int64_t>(part.size_in_bytes());
    });
    offsets.push_back(end);
  }
  const Scratch message(static_cast<std::size_t>(offsets.back()), stream);
  const int own = shard_group.rank();
  const std::int64_t own_begin = offsets[static_cast<std::size_t>(own)];
  each_slice(layout, batch, own, own_begin, [&](const TensorView& part, std::int64_t at) {
    copy_bytes(message.data() + at, part.data, part.size_in_bytes(), stream);
  });
  const RowCut cut(offsets);
  const TensorView out{message.data(), cut.count(), Dtype::kU8, stream.device()};
  shard_group.all_gather(out.slice(own_begin, cut.length(own)), out, stream, cut);
  for (int r = 0; r < shard_group.size(); ++r) {
    if (r == own) continue;
    each_slice(layout, batch, r, cut.begin(r), [&](const TensorView& part, std::int64_t at) {
      copy_bytes(part.data, message.data() + at, part.size_in_bytes(), stream);
    });
  }
}

}  // namespace

std::int64_t gather_slices(Communicator& shard_group, const BucketLayout& layout,
                           std::span<const FullArray> arrays, Stream& stream) {
  if (shard_group.size() == 1) return 0;
  std::int64_t gathers = 0;
  std::vector<FullArray> batch;
  std::size_t batch_bytes = 0;
  const auto flush = [&] {
    if (batch_bytes > 0) {
      gather_batch(shard_group, layout, batch, stream);
      ++gathers;
    }
    batch.clear();
    batch_bytes = 0;
  };
  for (const FullArray& full : arrays) {
    const std::size_t bytes = full.array.size_in_bytes();
    if (bytes >= kDirectBytes) {
      gather_direct(shard_group, layout, full, stream);
      ++gathers;
      continue;
    }
    if (batch_bytes + bytes > kBatchBytes) flush();
    batch.push_back(full);
    batch_bytes += bytes;
  }
  flush();
  return gathers;
}

}  // namespace hsdp::reducer
