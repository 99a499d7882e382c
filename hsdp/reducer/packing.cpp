#include "hsdp/reducer/packing.h"

#include <algorithm>

#include "hsdp/device/scratch.h"
#include "hsdp/kernels/cast_and_pack.h"

namespace hsdp::reducer {
namespace {

// Larger packs are written around the cache: the reader is another rank, later.
constexpr std::int64_t kStreamingBytes = std::int64_t{4} << 20;
// Elements of the scratch that holds (local sum + fresh) before it joins the carry: fits L1, and on
// a GPU its L2.
constexpr std::int64_t kHostElements = 2048;
constexpr std::int64_t kDeviceElements = std::int64_t{1} << 22;

std::int64_t piece_of_carry(std::int64_t count, Device device) {
  return std::min(count, device.type == DeviceType::kHost ? kHostElements : kDeviceElements);
}

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
                        const Stream& stream) {
  StridedView local_view;
  kernels::CastAndPack args = pack_of(contribution, 0, accumulator.count, local_view);
  args.out = accumulator.data;
  args.out_dtype = accumulator.dtype;
  kernels::cast_and_pack(args, stream);
}

void pack_segment(const Contribution& contribution, const BucketSegment& segment, int exponent,
                  TensorView staging, const Stream& stream) {
  StridedView local_view;
  kernels::CastAndPack args = pack_of(contribution, segment.flat_offset, segment.count, local_view);
  const TensorView out = staging.slice(segment.bucket_offset, segment.count);
  args.exponent = exponent;
  args.out = out.data;
  args.out_dtype = out.dtype;
  args.streaming_stores = static_cast<std::int64_t>(out.size_in_bytes()) >= kStreamingBytes;
  kernels::cast_and_pack(args, stream);
}

std::size_t add_to_carry_scratch(std::int64_t count, Device device) {
  return static_cast<std::size_t>(piece_of_carry(count, device)) * sizeof(float);
}

void add_to_carry(const Contribution& contribution, bool accumulate, TensorView carry,
                  const Stream& stream) {
  StridedView local_view;
  const bool two_sums = accumulate && contribution.accumulated.data != nullptr &&
                        (contribution.fresh != nullptr || contribution.hole);
  if (!two_sums) {
    kernels::CastAndPack args = pack_of(contribution, 0, carry.count, local_view);
    args.out = carry.data;
    args.out_dtype = Dtype::kF32;
    if (accumulate) {
      args.add = carry.data;
      args.add_dtype = Dtype::kF32;
    }
    kernels::cast_and_pack(args, stream);
    return;
  }
  // Order of rule 5: the row first, then the carry.
  const std::int64_t piece = piece_of_carry(carry.count, carry.device);
  const Scratch scratch(add_to_carry_scratch(carry.count, carry.device), stream);
  for (std::int64_t done = 0; done < carry.count; done += piece) {
    const std::int64_t count = std::min(piece, carry.count - done);
    kernels::CastAndPack row = pack_of(contribution, done, count, local_view);
    row.out = scratch.data();
    row.out_dtype = Dtype::kF32;
    kernels::cast_and_pack(row, stream);
    const StridedView row_view{scratch.data(), Dtype::kF32, carry.device, {count}, {}};
    kernels::CastAndPack sum;
    sum.gradient = &row_view;
    sum.count = count;
    sum.add = sum.out = carry.slice(done, count).data;
    kernels::cast_and_pack(sum, stream);
  }
}

}  // namespace hsdp::reducer
