#include "hsdp/device/flag.h"

#include "hsdp/device/cuda_device.h"

namespace hsdp {

Flag make_flag(Device device) {
  if (device.type == DeviceType::kCuda) return make_cuda_flag(device);
  return std::make_shared<std::atomic<std::uint32_t>>(0);
}

}  // namespace hsdp
