#include "hsdp/device/scratch.h"

#include "hsdp/device/cuda_device.h"

namespace hsdp {

Scratch::Scratch(std::size_t size, const Stream& stream)
    : memory_(stream.device().type == DeviceType::kCuda
                  ? allocate_cuda_scratch(size, stream)
                  : std::shared_ptr<std::byte>(new std::byte[size],
                                               std::default_delete<std::byte[]>())) {}

ScratchReserve::ScratchReserve(Device device, std::size_t size) {
  if (device.type != DeviceType::kCuda || size == 0) return;
  kept_ = reserve_cuda_scratch(device, size);
  size_bytes_ = static_cast<std::int64_t>(size);
}

}  // namespace hsdp
