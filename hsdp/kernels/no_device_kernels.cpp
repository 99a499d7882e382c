#include "hsdp/error.h"
#include "hsdp/kernels/device_kernels.h"

namespace hsdp::kernels {
namespace {

[[noreturn]] void refuse() {
  throw UsageError({.where = "kernels",
                    .expected = "a build with CUDA",
                    .got = "one without",
                    .remedy = "configure with -DHSDP_CUDA=ON, or use the cpu"});
}

}  // namespace

void run_on_device(const RowPass& /*pass*/, std::atomic<std::uint32_t>* /*nonfinite*/,
                   const Stream& /*stream*/) {
  refuse();
}

void pack_list_on_device(const PackKind& /*kind*/, std::span<const PackItem> /*items*/,
                         const Stream& /*stream*/) {
  refuse();
}

void pack_on_device(const CastAndPack& /*args*/, const Stream& /*stream*/) { refuse(); }

void sum_integers_on_device(const SumRows& /*args*/, const Stream& /*stream*/) { refuse(); }

void squared_norms_on_device(std::span<const SquaredNorm> /*norms*/, const Stream& /*stream*/) {
  refuse();
}

void find_nonfinite_on_device(ConstTensorView /*values*/, std::atomic<std::uint32_t>* /*nonfinite*/,
                              const Stream& /*stream*/) {
  refuse();
}

void add_digest_on_device(ConstTensorView /*values*/, std::uint64_t /*place*/,
                          std::uint64_t* /*sum*/, const Stream& /*stream*/) {
  refuse();
}

void indicate_on_device(const void* /*word*/, float* /*out*/, const Stream& /*stream*/) {
  refuse();
}

void poison_on_device(const std::atomic<std::uint32_t>& /*word*/, TensorView /*out*/,
                      std::atomic<std::uint32_t>* /*nonfinite*/, const Stream& /*stream*/) {
  refuse();
}

void sum_in_order_on_device(const double* /*values*/, std::int64_t /*count*/, double* /*sum*/,
                            const Stream& /*stream*/) {
  refuse();
}

void clip_factor_on_device(const ClipFactor& /*args*/, const Stream& /*stream*/) { refuse(); }

void scale_by_on_device(TensorView /*values*/, const double* /*factor*/, const Stream& /*stream*/) {
  refuse();
}

}  // namespace hsdp::kernels
