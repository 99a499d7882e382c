#include "hsdp/kernels/cuda_launch.cuh"
#include "hsdp/kernels/device_digest.h"
#include "hsdp/kernels/device_kernels.h"

namespace hsdp::kernels {

void add_digest_on_device(ConstTensorView values, std::uint64_t place, std::uint64_t* sum,
                          const Stream& stream) {
  const auto bytes = static_cast<std::int64_t>(values.size_in_bytes());
  launch(DigestBody{static_cast<const char*>(values.data), bytes, place, sum},
         blocks_for(bytes / DigestBody::kPartBytes), stream);
}

}  // namespace hsdp::kernels
