#include "hsdp/device/cuda_call.h"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <array>
#include <string>

#include "hsdp/error.h"

namespace hsdp {
namespace {

// To go back to a device that nobody has used yet would make a context there, hundreds of
// megabytes.
bool has_context(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* active);
  static const auto get_state = [] {
    void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver == nullptr
               ? GetState{}
               : reinterpret_cast<GetState>(::dlsym(driver, "cuDevicePrimaryCtxGetState"));
  }();
  unsigned flags = 0;
  int active = 1;
  return get_state == nullptr || get_state(device, &flags, &active) != 0 || active != 0;
}

}  // namespace

void check_cuda(int status, Device device, const std::string& what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // reported here, not once more by somebody else's check
  const auto error = static_cast<cudaError_t>(status);
  std::string message = "device: " + to_string(device) + ": cannot " + what +
                        ": expected success, got " + cudaGetErrorName(error) + " (" +
                        cudaGetErrorString(error) + ")";
  if (error == cudaErrorMemoryAllocation) message += "; free memory, or use smaller bucket_bytes";
  throw Error(message);
}

void require_cuda(Device device) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  const std::string prefix = "device: cannot use " + to_string(device) + ": expected ";
  if (status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice ||
      (status == cudaSuccess && count == 0)) {
    static_cast<void>(cudaGetLastError());
    const bool no_driver = status == cudaErrorInsufficientDriver;
    throw UsageError(prefix +
                     (no_driver ? "a CUDA driver, got none or one that is too old"
                                : "a GPU, got a machine where the driver finds none") +
                     " (" + cudaGetErrorString(status) +
                     "); install or update the NVIDIA driver, look at CUDA_VISIBLE_DEVICES, or use "
                     "the cpu");
  }
  check_cuda(status, device, "count devices");
  if (device.index < 0 || device.index >= count) {
    throw UsageError(prefix + "an index below the " + std::to_string(count) +
                     " devices of this machine, got " + std::to_string(device.index) +
                     "; look at CUDA_VISIBLE_DEVICES and at the ranks per node");
  }
}

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  static_cast<void>(cudaGetLastError());
  return 0;
}

std::string cuda_bus_id(Device device) {
  std::array<char, 64> text{};
  check_cuda(cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), device.index),
             device, "ask for its bus id");
  return text.data();
}

void clear_cuda_memory(Device device, void* memory, std::size_t size) {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), device, "make a stream");
  cudaError_t status = cudaMemsetAsync(memory, 0, size, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  static_cast<void>(cudaStreamDestroy(stream));
  check_cuda(status, device, "clear memory");
}

OnCudaDevice::OnCudaDevice(Device device) {
  int current = 0;
  check_cuda(cudaGetDevice(&current), device, "ask for the current device");
  if (current == device.index) return;
  check_cuda(cudaSetDevice(device.index), device, "make it the current device");
  saved_ = current;
}

OnCudaDevice::~OnCudaDevice() {
  if (saved_ >= 0 && has_context(saved_)) static_cast<void>(cudaSetDevice(saved_));
}

}  // namespace hsdp
