#include "hsdp/reducer/packing.h"

#include "hsdp/kernels/cast_and_pack.h"

namespace hsdp::reducer {
namespace {

// Larger packs bypass the cache, as another rank reads them later.
constexpr std::int64_t kStreamingBytes = std::int64_t{4} << 20;
StridedView flat_view(TensorView view) {
  return {view.data, view.dtype, view.device, {view.count}, {}};
}

// The kernel's arguments for elements [begin, begin + count) of a contribution.
kernels::CastAndPack pack_of(const Contribution& contribution, std::int64_t begin,
                             std::int64_t count, StridedView& local_view) {
  kernels::CastAndPack args;
  args.begin = begin;
  args.count = count;
  if (contribution.fresh != nullptr || contribution.hole) {
    args.gradient = contribution.fresh;
    if (contribution.accumulated.data != nullptr) {
      args.add = contribution.accumulated.slice(begin, count).data;
      args.add_dtype = contribution.accumulated.dtype;
    }
  } else if (contribution.accumulated.data != nullptr) {
    local_view = flat_view(contribution.accumulated);
    args.gradient = &local_view;
  }
  return args;
}

}  // namespace

void add_to_accumulator(const Contribution& contribution, TensorView accumulator,
                        kernels::PackQueue& queue) {
  StridedView local_view;
  kernels::CastAndPack args = pack_of(contribution, 0, accumulator.count, local_view);
  args.out = accumulator.data;
  args.out_dtype = accumulator.dtype;
  queue.add(args);
}

void pack_segment(const Contribution& contribution, const BucketSegment& segment, int exponent,
                  TensorView staging, kernels::PackQueue& queue) {
  StridedView local_view;
  kernels::CastAndPack args = pack_of(contribution, segment.flat_offset, segment.count, local_view);
  const TensorView out = staging.slice(segment.bucket_offset, segment.count);
  args.exponent = exponent;
  args.out = out.data;
  args.out_dtype = out.dtype;
  args.streaming_stores = static_cast<std::int64_t>(out.size_in_bytes()) >= kStreamingBytes;
  queue.add(args);
}

// Order of rule 5: the row first, then the carry.
void add_to_carry(const Contribution& contribution, bool accumulate, std::int64_t begin,
                  TensorView carry, kernels::PackQueue& queue) {
  StridedView local_view;
  kernels::CastAndPack args = pack_of(contribution, begin, carry.count, local_view);
  args.out = carry.data;
  args.out_dtype = carry.dtype;
  if (accumulate && args.add != nullptr) {
    args.base = carry.data;
  } else if (accumulate) {
    args.add = carry.data;
    args.add_dtype = carry.dtype;
  }
  queue.add(args);
}

}  // namespace hsdp::reducer
