#include "hsdp/device/cuda_call.h"

#include <cuda_runtime.h>

#include <array>
#include <string>

#include "hsdp/error.h"

namespace hsdp {
namespace {

void* driver_function(const char* name) {
  constexpr unsigned kSince = 7000;  // the CUDA version to ask for: all these functions are that
                                     // old
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, kSince, cudaEnableDefault, &found);
#else
  static_cast<void>(kSince);
  const cudaError_t status = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  if (status == cudaSuccess && found == cudaDriverEntryPointSuccess) return function;
  static_cast<void>(cudaGetLastError());
  return nullptr;
}

// Restoring a device that the process has not used yet would create a context there, which takes
// hundreds of megabytes.
bool has_context(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* active);
  static const auto get_state =
      reinterpret_cast<GetState>(driver_function("cuDevicePrimaryCtxGetState"));
  unsigned flags = 0;
  int active = 1;
  return get_state == nullptr || get_state(device, &flags, &active) != 0 || active != 0;
}

// Sets the thread's capture mode and returns the previous one.
int exchange_capture_mode(int mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(mode);
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&exchanged));
  return exchanged;
}

}  // namespace

void check_cuda(int status, Device device, const std::string& what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // clear it, so that later checks do not report it again
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

void require_no_capture(Device device, void* stream) {
  const OnCudaDevice current(device);  // a null stream is this device's default stream
  cudaStreamCaptureStatus captured = cudaStreamCaptureStatusNone;
  const cudaError_t status = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &captured);
  const bool is_implicit = status == cudaErrorStreamCaptureImplicit;  // through the default stream
  if (is_implicit) static_cast<void>(cudaGetLastError());
  if (!is_implicit && captured == cudaStreamCaptureStatusNone) return;
  throw UsageError({.where = "device: " + to_string(device),
                    .expected = "a stream that is not being captured into a CUDA graph",
                    .got = "one that is",
                    .remedy = "hand gradients over, and read results, outside of the capture"});
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
  if (current != device.index) {
    check_cuda(cudaSetDevice(device.index), device, "make it the current device");
    saved_ = current;
  }
  capture_mode_ = exchange_capture_mode(cudaStreamCaptureModeRelaxed);
}

OnCudaDevice::~OnCudaDevice() {
  static_cast<void>(exchange_capture_mode(capture_mode_));
  if (saved_ >= 0 && has_context(saved_)) static_cast<void>(cudaSetDevice(saved_));
}

}  // namespace hsdp
