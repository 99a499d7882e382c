#include <string>

#include "hsdp/error.h"
#include "hsdp/kernels/cuda_launch.cuh"
#include "quant/device_quantize.h"
#include "quant/quantize_kernels.h"

namespace hsdp::quant {
namespace {

// The plain word behind a flag, which a kernel writes.
std::uint32_t* word_of(std::atomic<std::uint32_t>* flag) {
  return reinterpret_cast<std::uint32_t*>(flag);
}

template <bool kSums>
void run_dequantize(const Dequantize& args, const Stream& stream) {
  DequantizeBody<kSums> body;
  body.tiles = args.tiles.data();
  body.tile_count = static_cast<std::int64_t>(args.tiles.size());
  body.cut = UnitCut(args.group_size);
  body.in = args.in;
  body.values = args.values;
  body.begin = args.begin;
  body.nonfinite = word_of(args.nonfinite);
  kernels::launch(body, body.tile_count, stream);
}

}  // namespace

void quantize_on_device(const Quantize& args, const Stream& stream) {
  if (args.tiles.empty()) return;
  QuantizeBody body;
  body.tiles = args.tiles.data();
  body.tile_count = static_cast<std::int64_t>(args.tiles.size());
  body.cut = UnitCut(args.group_size);
  body.values = args.values;
  body.factor = args.factor;
  body.received = args.received;
  body.before = args.before;
  body.after = args.after;
  body.beta = args.beta;
  body.has_dither = args.dither != nullptr;
  if (body.has_dither) body.dither = *args.dither;
  body.out = args.out;
  body.figures = args.figures;
  body.nonfinite = word_of(args.nonfinite);
  kernels::launch(body, body.tile_count, stream);
}

void dequantize_on_device(const Dequantize& args, const Stream& stream) {
  if (args.tiles.empty()) return;
  args.in.count > 1 ? run_dequantize<true>(args, stream) : run_dequantize<false>(args, stream);
}

}  // namespace hsdp::quant
