#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "hsdp/device/scratch.h"
#include "hsdp/kernels/cuda_launch.cuh"
#include "hsdp/kernels/device_clip.h"
#include "hsdp/kernels/device_kernels.h"
#include "hsdp/kernels/device_nonfinite.h"
#include "hsdp/kernels/device_norm.h"
#include "hsdp/kernels/device_plan.h"
#include "hsdp/kernels/device_wide_pass.h"
#include "hsdp/kernels/norm.h"

namespace hsdp::kernels {
namespace {

template <int kElementBytes>
void sum_chunks(Dtype dtype, bool squares, std::span<const NormItem> items, const Stream& stream) {
  using Body = ChunkSumBody<kElementBytes>;
  while (!items.empty()) {
    const auto count = std::min<std::size_t>(items.size(), kMostNormItems);
    Body body;
    body.dtype = dtype;
    body.squares = squares;
    for (const NormItem& item : items.first(count)) {
      NormItem& placed = body.items[body.item_count++] = item;
      placed.first_unit = body.unit_count;
      body.unit_count +=
          static_cast<std::uint32_t>((norm_chunks(item.count) + Body::kChunks - 1) / Body::kChunks);
    }
    launch(body, body.unit_count, stream);
    items = items.subspan(count);
  }
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

// Runs level by level, all items at once. The sums of each level follow those of the previous one.
void squared_norms_on_device(std::span<const SquaredNorm> norms, const Stream& stream) {
  if (norms.empty()) return;
  const Scratch scratch(squared_norms_scratch(norms), stream);
  auto* unused = reinterpret_cast<double*>(scratch.data());
  std::vector<NormItem> items;
  std::vector<double*> totals;
  const auto add = [&](std::vector<NormItem>& to, const char* values, std::int64_t count,
                       double* total) {
    const std::int64_t chunks = norm_chunks(count);
    to.push_back({values, chunks > 1 ? unused : total, count});
    if (chunks > 1) unused += chunks;
  };
  for (const SquaredNorm& norm : norms) {
    require_alignment(norm.values.data, norm.values.dtype);
    add(items, static_cast<const char*>(norm.values.data), norm.values.count, norm.sum);
    totals.push_back(norm.sum);
  }
  const Dtype dtype = norms.front().values.dtype;
  if (dtype == Dtype::kF64) {
    sum_chunks<8>(dtype, true, items, stream);
  } else if (dtype == Dtype::kF32) {
    sum_chunks<4>(dtype, true, items, stream);
  } else {
    sum_chunks<2>(dtype, true, items, stream);
  }
  while (!items.empty()) {
    std::vector<NormItem> next;
    std::vector<double*> next_totals;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const std::int64_t chunks = norm_chunks(items[i].count);
      if (chunks == 1) continue;
      add(next, reinterpret_cast<const char*>(items[i].sums), chunks, totals[i]);
      next_totals.push_back(totals[i]);
    }
    sum_chunks<8>(Dtype::kF64, false, next, stream);
    items = std::move(next);
    totals = std::move(next_totals);
  }
}

void find_nonfinite_on_device(ConstTensorView values, std::atomic<std::uint32_t>* nonfinite,
                              const Stream& stream) {
  if (values.count == 0) return;
  require_alignment(values.data, values.dtype);
  if (values.dtype == Dtype::kF64) {
    WidePassBody<double> body;
    body.rows.first = static_cast<const char*>(values.data);
    body.row_count = 1;
    body.count = values.count;
    body.nonfinite = reinterpret_cast<std::uint32_t*>(nonfinite);
    launch(body, blocks_for(values.count), stream);
  } else if (values.dtype == Dtype::kF32) {
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

void scale_by_on_device(TensorView values, const double* factor, const Stream& stream) {
  if (values.count == 0) return;
  require_alignment(values.data, values.dtype);
  if (values.dtype == Dtype::kF64) {
    launch(WideScaleByBody{static_cast<double*>(values.data), values.count, factor},
           blocks_for(values.count), stream);
    return;
  }
  launch(ScaleByBody{static_cast<float*>(values.data), values.count,
                     elements_to_alignment(values.data, sizeof(float), values.count), factor},
         blocks_for(values.count / ScaleByBody::kElements), stream);
}

}  // namespace hsdp::kernels
