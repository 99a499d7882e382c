#include "hsdp/error.h"
#include "zero/adamw_kernels.h"

namespace hsdp::zero {
namespace {

[[noreturn]] void refuse() {
  throw UsageError({.where = "zero",
                    .expected = "a build with CUDA",
                    .got = "one without",
                    .remedy = "configure with -DHSDP_CUDA=ON, or use the cpu"});
}

}  // namespace

void adamw_tick_on_device(const AdamWTick& /*args*/, const Stream& /*stream*/) { refuse(); }

void adamw_update_on_device(std::span<const AdamWSlice> /*slices*/, const AdamWClock* /*clock*/,
                            const Stream& /*stream*/) {
  refuse();
}

}  // namespace hsdp::zero
