// Calls into the CUDA runtime: errors as exceptions, and which device the thread talks to. Internal
// to the CUDA sources; the runtime's types stay out of headers, so a status is an int.
#pragma once

#include <cstddef>
#include <string>

#include "hsdp/error.h"
#include "hsdp/tensor_view.h"

namespace hsdp {

// Error "device: cuda:0: cannot <what>: ..." unless `status` is cudaSuccess.
void check_cuda(int status, Device device, const std::string& what);

// UsageError unless there is a driver and that device.
void require_cuda(Device device);

// Of this process; 0 without a driver.
[[nodiscard]] int cuda_device_count();

// Names the GPU behind the device on this host, however processes number theirs.
[[nodiscard]] std::string cuda_bus_id(Device device);

// UsageError while a cudaStream_t of somebody else is captured into a CUDA graph: what is asked of
// it would be no part of the graph, or spoil it.
void require_no_capture(Device device, void* stream);

// Fills memory of the current device with zeros; done when it returns.
void clear_cuda_memory(Device device, void* memory, std::size_t size);

// Around calls of our own, each of which would make a context on the thread's current device: makes
// `device` that one while it lives, and leaves the caller's as it was, unless nobody in the process
// has used that. What somebody captures into a graph meanwhile is none of these calls' business,
// and stays whole.
class OnCudaDevice {
 public:
  explicit OnCudaDevice(Device device);
  ~OnCudaDevice();
  OnCudaDevice(const OnCudaDevice&) = delete;
  OnCudaDevice& operator=(const OnCudaDevice&) = delete;

 private:
  int saved_ = -1;  // of the caller; -1: nothing to restore
  int capture_mode_;
};

// Whether the calling thread is in a task of a stream, whose lock it holds.
[[nodiscard]] bool in_cuda_task();

// Before an allocation of `device` is tried once more: of our pools, and of the memory source.
void give_back_unused_memory(Device device);

// Returns what `act` does, which takes memory of `device`; once more where it throws a Failure.
template <class Failure, class Act>
auto take_memory(Device device, const Act& act) {
  try {
    return act();
  } catch (const Failure&) {
    give_back_unused_memory(device);
    return act();
  }
}

// Runs `act`, which gives something of `device` back; where the driver is gone, that is gone too.
template <class Act>
void give_back_on(Device device, const Act& act) noexcept {
  try {
    const OnCudaDevice current(device);
    act();
  } catch (const Error&) {  // nothing is left to give back
  }
}

}  // namespace hsdp
