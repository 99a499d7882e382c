// Memory of a GPU, and the host's words that a GPU writes.
#include <cuda_runtime.h>

#include <array>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>

#include "hsdp/device/cuda_call.h"
#include "hsdp/device/cuda_device.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

constexpr int kMostDevices = 64;
// Scratch is needed again in every step; the limit would count what is in use, too.
constexpr std::uint64_t kKeptBytes = std::numeric_limits<std::uint64_t>::max();

// What one device's allocations need, made on first use and never destroyed: the driver may be
// gone before our last destructor.
struct DevicePool {
  cudaMemPool_t pool = nullptr;
  cudaStream_t stream = nullptr;  // long-lived memory is zeroed and freed here
};

DevicePool make_pool(Device device) {
  DevicePool made;
  cudaMemPoolProps properties;
  std::memset(&properties, 0, sizeof(properties));
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device.index;
  check_cuda(cudaMemPoolCreate(&made.pool, &properties), device, "make a memory pool");
  std::uint64_t kept = kKeptBytes;
  check_cuda(cudaMemPoolSetAttribute(made.pool, cudaMemPoolAttrReleaseThreshold, &kept), device,
             "set up a memory pool");
  check_cuda(cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking), device,
             "make a stream");
  return made;
}

const DevicePool& pool_of(Device device) {
  static std::mutex mutex;
  static std::array<DevicePool, kMostDevices> pools;
  if (device.index >= kMostDevices) {
    throw UsageError({.where = "device",
                      .expected = "an index below " + std::to_string(kMostDevices),
                      .got = to_string(device)});
  }
  const std::lock_guard lock(mutex);
  DevicePool& pool = pools[static_cast<std::size_t>(device.index)];
  if (pool.stream == nullptr) pool = make_pool(device);
  return pool;
}

// `kept` lives as long as the memory, which is freed on `stream`.
std::shared_ptr<std::byte> allocate(Device device, std::size_t size, cudaStream_t stream,
                                    const std::optional<Stream>& kept = {}) {
  const DevicePool& pool = pool_of(device);
  void* memory = nullptr;
  check_cuda(cudaMallocFromPoolAsync(&memory, size, pool.pool, stream), device,
             "allocate " + std::to_string(size) + " bytes");
  return {static_cast<std::byte*>(memory), [device, stream, kept](std::byte* data) {
            // With the device current, whose default stream a null one is.
            give_back_on(device, [&] { static_cast<void>(cudaFreeAsync(data, stream)); });
          }};
}

void* allocate_pinned(Device device, std::size_t size) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, size, cudaHostAllocPortable | cudaHostAllocMapped), device,
             "allocate " + std::to_string(size) + " bytes of pinned host memory");
  return memory;
}

// Words of pinned memory, one to a cache line, handed out again after use: pinning stops the GPU,
// and so does unpinning.
class FlagPool {
 public:
  std::atomic<std::uint32_t>* take(Device device) {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) grow(device);
    std::atomic<std::uint32_t>* const flag = free_.front();
    free_.pop_front();
    flag->store(0, std::memory_order_relaxed);
    return flag;
  }
  void give_back(std::atomic<std::uint32_t>* flag) {
    const std::lock_guard lock(mutex_);
    free_.push_back(flag);
  }

 private:
  static constexpr std::size_t kSlabBytes = 4096;
  static constexpr std::size_t kSpacingBytes = 64;

  void grow(Device device) {
    auto* const bytes = static_cast<std::byte*>(allocate_pinned(device, kSlabBytes));
    for (std::size_t offset = 0; offset < kSlabBytes; offset += kSpacingBytes) {
      free_.push_back(new (bytes + offset) std::atomic<std::uint32_t>(0));
    }
  }

  std::mutex mutex_;
  std::deque<std::atomic<std::uint32_t>*> free_;
};

FlagPool& flag_pool() {
  static auto* const pool = new FlagPool;  // flags may outlive static destruction
  return *pool;
}

}  // namespace

std::shared_ptr<std::byte> allocate_cuda(Device device, std::size_t size) {
  require_cuda(device);
  if (size == 0) return nullptr;
  const OnCudaDevice current(device);
  cudaStream_t const stream = pool_of(device).stream;
  std::shared_ptr<std::byte> memory = allocate(device, size, stream);
  check_cuda(cudaMemsetAsync(memory.get(), 0, size, stream), device, "clear memory");
  check_cuda(cudaStreamSynchronize(stream), device, "clear memory");
  return memory;
}

std::shared_ptr<std::byte> allocate_cuda_pinned(Device device, std::size_t size) {
  require_cuda(device);
  if (size == 0) return nullptr;
  const OnCudaDevice current(device);
  auto* const memory = static_cast<std::byte*>(allocate_pinned(device, size));
  std::memset(memory, 0, size);
  return {memory, [device](std::byte* data) {
            give_back_on(device, [data] { static_cast<void>(cudaFreeHost(data)); });
          }};
}

std::shared_ptr<std::byte> allocate_cuda_scratch(std::size_t size, const Stream& stream) {
  if (size == 0) return nullptr;
  require_no_capture(stream.device(), stream.native_handle());
  const OnCudaDevice current(stream.device());
  return allocate(stream.device(), size, static_cast<cudaStream_t>(stream.native_handle()), stream);
}

std::shared_ptr<std::atomic<std::uint32_t>> make_cuda_flag(Device device) {
  require_cuda(device);
  const OnCudaDevice current(device);
  return {flag_pool().take(device),
          [](std::atomic<std::uint32_t>* flag) { flag_pool().give_back(flag); }};
}

void copy_on_cuda(void* to, const void* from, std::size_t size, const Stream& stream) {
  if (size == 0) return;
  require_no_capture(stream.device(), stream.native_handle());
  const OnCudaDevice current(stream.device());
  check_cuda(cudaMemcpyAsync(to, from, size, cudaMemcpyDefault,
                             static_cast<cudaStream_t>(stream.native_handle())),
             stream.device(), "copy " + std::to_string(size) + " bytes");
}

}  // namespace hsdp
