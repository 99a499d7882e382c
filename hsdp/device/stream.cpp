#include "hsdp/device/stream.h"

#include "hsdp/device/cuda_device.h"
#include "hsdp/device/inline_queue.h"
#include "hsdp/device/worker_queue.h"

namespace hsdp {

Stream Stream::inline_host() { return Stream(std::make_shared<InlineQueue>()); }

Stream Stream::host_worker(const std::string& thread_name) {
  return Stream(std::make_shared<WorkerQueue>(thread_name));
}

Stream Stream::create(Device device, const std::string& name) {
  if (device.type == DeviceType::kCuda) return Stream(make_cuda_queue(device, name));
  return host_worker(name);
}

Stream Stream::borrow(Device device, void* native_handle) {
  if (device.type == DeviceType::kCuda) return Stream(borrow_cuda_queue(device, native_handle));
  return inline_host();
}

void Stream::wait_in_task(std::span<const Event> events) const {
  for (const Event& event : events) {
    if (device().type == DeviceType::kHost) {
      event.wait();  // an inline stream would keep the error to itself
    } else {
      queue_->wait(event);
    }
  }
}

Stream Stream::inside_task() const {
  return device().type == DeviceType::kCuda ? *this : inline_host();
}

}  // namespace hsdp
