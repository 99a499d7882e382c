#include "hsdp/device/copy.h"

#include <cstring>

#include "hsdp/device/cuda_device.h"

namespace hsdp {

void copy_bytes(void* to, const void* from, std::size_t size, const Stream& stream) {
  if (stream.device().type == DeviceType::kCuda) {
    copy_on_cuda(to, from, size, stream);
  } else if (size > 0) {
    std::memcpy(to, from, size);
  }
}

}  // namespace hsdp
