#include "device_rules.h"

#include <cuda_runtime.h>

#include <optional>

#include "trace.h"

namespace hsdp::nccl_shim {
namespace {

std::optional<int> device_of(cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  int device = -1;
  if (cudaStreamGetDevice(stream, &device) == cudaSuccess) return device;
#else
  static_cast<void>(stream);
#endif
  return std::nullopt;
}

}  // namespace

int current_device() {
  int device = -1;
  return cudaGetDevice(&device) == cudaSuccess ? device : -1;
}

void check_device(const std::string& call, const Seat& on) {
  const int current = current_device();
  if (current < 0 || on.device < 0 || current == on.device) return;
  report_violation("device", call + " on " + on.text() + " of device " + std::to_string(on.device) +
                                 " while device " + std::to_string(current) + " is current");
}

void check_stream(const std::string& call, const Seat& on, void* handle) {
  auto* const stream = static_cast<cudaStream_t>(handle);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
      status != cudaStreamCaptureStatusNone) {
    report_violation("stream_capture",
                     call + " on " + on.text() + " with a stream that is being captured");
  }
  if (stream == nullptr) return;  // the current device's default stream
  const std::optional<int> device = device_of(stream);
  if (!device) {
    report_note("stream_device", "not checked: it needs CUDA 12.8 and a driver that knows it");
  } else if (on.device >= 0 && *device != on.device) {
    report_violation("stream_device", call + " on " + on.text() + " of device " +
                                          std::to_string(on.device) + " with a stream of device " +
                                          std::to_string(*device));
  }
}

}  // namespace hsdp::nccl_shim
