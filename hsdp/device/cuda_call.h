// Calls into the CUDA runtime: turns errors into exceptions and selects the thread's current
// device. Internal to the CUDA sources. Runtime types stay out of headers, so a status is an int.
#pragma once

#include <cstddef>
#include <string>

#include "hsdp/error.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

// Throws Error "device: cuda:0: cannot <what>: ..." unless `status` is cudaSuccess.
void check_cuda(int status, Device device, const std::string& what);

// Throws UsageError without a driver or without that device.
void require_cuda(Device device);

// Number of devices this process sees; 0 without a driver.
[[nodiscard]] int cuda_device_count();

// The GPU's PCI bus id: names it on this host regardless of how processes number their devices.
[[nodiscard]] std::string cuda_bus_id(Device device);

// Throws UsageError while the borrowed cudaStream_t is being captured into a CUDA graph: our calls
// would be missing from the graph, or would invalidate the capture.
void require_no_capture(Device device, void* stream);

// Fills memory of the current device with zeros; done on return.
void clear_cuda_memory(Device device, void* memory, std::size_t size);

// Makes `device` current for our own calls, which create a context on the thread's current device.
// The destructor restores the caller's device, unless the process has not used that device yet.
// Captures of CUDA graphs by others are neither affected nor invalidated meanwhile.
class OnCudaDevice {
 public:
  explicit OnCudaDevice(Device device);
  ~OnCudaDevice();
  OnCudaDevice(const OnCudaDevice&) = delete;
  OnCudaDevice& operator=(const OnCudaDevice&) = delete;

 private:
  int saved_ = -1;  // the caller's device; -1: nothing to restore
  int capture_mode_;
};

// Whether the calling thread is running a task of a stream, and so holds the stream's lock.
[[nodiscard]] bool in_cuda_task();

// Returns unused memory of our pools and of the memory source to the driver.
void give_back_unused_memory(Device device);

// Returns the result of `act`, which allocates memory of `device`. Retries once after a Failure.
template <class Failure, class Act>
auto take_memory(Device device, const Act& act) {
  try {
    return act();
  } catch (const Failure&) {
    give_back_unused_memory(device);
    return act();
  }
}

// Runs `act`, which returns a resource to `device`. Ignores Errors.
template <class Act>
void give_back_on(Device device, const Act& act) noexcept {
  try {
    const OnCudaDevice current(device);
    act();
  } catch (const Error&) {  // without a driver there is nothing to return
  }
}

}  // namespace hsdp
