#include <utility>

#include "hsdp/device/scratch.h"
#include "hsdp/kernels/cuda_launch.cuh"
#include "hsdp/kernels/device_clip.h"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/device_nonfinite.h"
#include "hsdp/kernels/device_norm.h"
#include "hsdp/kernels/device_plan.h"
#include "hsdp/kernels/norm.h"

namespace hsdp::kernels {
namespace {

template <int kElementBytes>
void sum_chunks(ConstTensorView values, double* sums, const Stream& stream) {
  using Body = ChunkSumBody<kElementBytes>;
  const std::int64_t chunks = norm_chunks(values.count);
  launch(Body{static_cast<const char*>(values.data), values.dtype, values.count, sums},
         (chunks + Body::kChunks - 1) / Body::kChunks, stream);
}

template <int kElementBytes>
void find(ConstTensorView values, std::atomic<std::uint32_t>* nonfinite, const Stream& stream) {
  using Body = NonfiniteBody<kElementBytes>;
  launch(Body{static_cast<const char*>(values.data), values.dtype, values.count,
              elements_to_alignment(values.data, kElementBytes, values.count),
              reinterpret_cast<std::uint32_t*>(nonfinite)},
         blocks_for(values.count / Body::kElements), stream);
}

}  // namespace

void squared_norm_on_device(ConstTensorView values, double* sum, const Stream& stream) {
  require_alignment(values.data, values.dtype);
  // The sums of each level lie behind those of the one before; the last one goes to `sum`.
  std::int64_t count = norm_chunks(values.count);
  const Scratch scratch(squared_norm_scratch(values.count), stream);
  auto* level = reinterpret_cast<double*>(scratch.data());
  double* const first = count > 1 ? level : sum;
  if (values.dtype == Dtype::kF32) {
    sum_chunks<4>(values, first, stream);
  } else {
    sum_chunks<2>(values, first, stream);
  }
  while (count > 1) {
    const std::int64_t next = norm_chunks(count);
    sum_chunks<8>({level, count, Dtype::kF64, values.device}, next > 1 ? level + count : sum,
                  stream);
    level += count;
    count = next;
  }
}

void find_nonfinite_on_device(ConstTensorView values, std::atomic<std::uint32_t>* nonfinite,
                              const Stream& stream) {
  if (values.count == 0) return;
  require_alignment(values.data, values.dtype);
  if (values.dtype == Dtype::kF32) {
    find<4>(values, nonfinite, stream);
  } else {
    find<2>(values, nonfinite, stream);
  }
}

void indicate_on_device(const void* word, float* out, const Stream& stream) {
  launch(IndicateBody{word, out}, 1, stream);
}

void poison_on_device(const std::atomic<std::uint32_t>& word, TensorView out,
                      std::atomic<std::uint32_t>* nonfinite, const Stream& stream) {
  launch(PoisonBody{reinterpret_cast<const std::uint32_t*>(&word), static_cast<char*>(out.data),
                    static_cast<std::int64_t>(out.size_in_bytes()),
                    reinterpret_cast<std::uint32_t*>(nonfinite)},
         PoisonBody::kBlocks, stream);
}

void sum_in_order_on_device(const double* values, std::int64_t count, double* sum,
                            const Stream& stream) {
  launch(OrderedSumBody{values, count, sum}, 1, stream);
}

void clip_factor_on_device(const ClipFactor& args, const Stream& stream) {
  launch(ClipFactorBody{args}, 1, stream);
}

void scale_by_on_device(TensorView values, const float* factor, const Stream& stream) {
  if (values.count == 0) return;
  require_alignment(values.data, Dtype::kF32);
  launch(ScaleByBody{static_cast<float*>(values.data), values.count,
                     elements_to_alignment(values.data, sizeof(float), values.count), factor},
         blocks_for(values.count / ScaleByBody::kElements), stream);
}

}  // namespace hsdp::kernels
