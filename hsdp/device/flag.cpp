#include "hsdp/device/flag.h"

#include <mutex>
#include <utility>
#include <vector>

#include "hsdp/device/cuda_device.h"

namespace hsdp {

Flag make_flag(Device device) {
  if (device.type == DeviceType::kCuda) return make_cuda_flag(device);
  return std::make_shared<std::atomic<std::uint32_t>>(0);
}

std::atomic<std::uint32_t>& keep_for_good(Flag flag) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<Flag>;
  const std::lock_guard lock(mutex);
  return *kept->emplace_back(std::move(flag));
}

}  // namespace hsdp
