#include "hsdp/device/cuda_stream_pool.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "hsdp/device/cuda_call.h"

namespace hsdp {
namespace {

struct Pool {
  std::mutex mutex;
  std::map<int, std::vector<cudaStream_t>> unused;  // by device
};

Pool& pool() {
  static auto* const one = new Pool;  // streams are still returned at exit
  return *one;
}

bool is_idle(cudaStream_t stream) {
  const bool idle = cudaStreamQuery(stream) == cudaSuccess;
  if (!idle) static_cast<void>(cudaGetLastError());
  return idle;
}

}  // namespace

void* take_cuda_stream(Device device) {
  {
    const std::lock_guard lock(pool().mutex);
    std::vector<cudaStream_t>& unused = pool().unused[device.index];
    const auto found = std::ranges::find_if(unused, is_idle);
    if (found != unused.end()) {
      cudaStream_t const stream = *found;
      unused.erase(found);
      return stream;
    }
  }
  int lowest = 0;
  int highest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), device,
             "ask for the priorities of streams");
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), device,
             "make a stream");
  return stream;
}

void return_cuda_stream(Device device, void* stream) noexcept {
  const std::lock_guard lock(pool().mutex);
  pool().unused[device.index].push_back(static_cast<cudaStream_t>(stream));
}

}  // namespace hsdp
