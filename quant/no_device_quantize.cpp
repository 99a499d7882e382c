#include "hsdp/error.h"
#include "quant/quantize_kernels.h"

namespace hsdp::quant {
namespace {

[[noreturn]] void refuse() {
  throw UsageError({.where = "quant",
                    .expected = "a build with CUDA",
                    .got = "one without",
                    .remedy = "configure with -DHSDP_CUDA=ON, or use the cpu"});
}

}  // namespace

void quantize_on_device(const Quantize& /*args*/, const Stream& /*stream*/) { refuse(); }

void dequantize_on_device(const Dequantize& /*args*/, const Stream& /*stream*/) { refuse(); }

}  // namespace hsdp::quant
