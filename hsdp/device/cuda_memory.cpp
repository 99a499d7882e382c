// GPU memory, and the host words that a GPU writes.
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>

#include "hsdp/device/cuda_call.h"
#include "hsdp/device/cuda_device.h"
#include "hsdp/device/memory_source.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

constexpr int kMostDevices = 64;

// The pools of one device, made on first use and never destroyed: the driver may be gone before our
// last destructor.
struct DevicePools {
  cudaMemPool_t lasting = nullptr;            // returns freed memory at once
  cudaMemPool_t scratch = nullptr;            // keeps what is reserved
  std::atomic<cudaStream_t> stream{nullptr};  // long-lived memory is zeroed and freed here
  std::atomic<std::uint64_t> reserved{0};     // bytes of scratch
  std::mutex mutex;
};

cudaMemPool_t make_pool(Device device) {
  cudaMemPoolProps properties;
  std::memset(&properties, 0, sizeof(properties));
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device.index;
  cudaMemPool_t pool = nullptr;
  check_cuda(cudaMemPoolCreate(&pool, &properties), device, "make a memory pool");
  return pool;
}

cudaStream_t make_stream(Device device) {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), device, "make a stream");
  return stream;
}

DevicePools& pools_of(Device device) {
  static auto* const all = new std::array<DevicePools, kMostDevices>;
  if (device.index >= kMostDevices) {
    throw UsageError({.where = "device",
                      .expected = "an index below " + std::to_string(kMostDevices),
                      .got = to_string(device)});
  }
  DevicePools& pools = (*all)[static_cast<std::size_t>(device.index)];
  const std::lock_guard lock(pools.mutex);
  if (pools.stream != nullptr) return pools;
  pools.lasting = make_pool(device);
  pools.scratch = make_pool(device);
  pools.stream = make_stream(device);
  return pools;
}

// Memory from `pool`, freed on `stream`. The deleter keeps `kept` alive.
std::shared_ptr<std::byte> allocate(Device device, std::size_t size, cudaMemPool_t pool,
                                    cudaStream_t stream, const std::optional<Stream>& kept = {}) {
  void* memory = nullptr;
  cudaError_t status = cudaMallocFromPoolAsync(&memory, size, pool, stream);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    give_back_unused_memory(device);
    status = cudaMallocFromPoolAsync(&memory, size, pool, stream);
  }
  check_cuda(status, device, "allocate " + std::to_string(size) + " bytes");
  return {static_cast<std::byte*>(memory), [device, stream, kept](std::byte* data) {
            // Needs the current device: a null stream is its default stream.
            give_back_on(device, [&] { static_cast<void>(cudaFreeAsync(data, stream)); });
          }};
}

// Sets how much unused memory the pool keeps. The pool allocates in chunks and returns everything
// unused once it exceeds the threshold by any part of a chunk.
void keep_scratch(DevicePools& pools, Device device) {
  constexpr std::uint64_t kChunk = std::uint64_t{32} << 20;
  const std::lock_guard lock(pools.mutex);
  std::uint64_t bytes = pools.reserved == 0 ? 0 : pools.reserved + kChunk;
  check_cuda(cudaMemPoolSetAttribute(pools.scratch, cudaMemPoolAttrReleaseThreshold, &bytes),
             device, "set up a memory pool");
}

// Null without a memory source, or where it must not be called.
std::shared_ptr<std::byte> from_source(Device device, std::size_t size, cudaStream_t stream) {
  const auto source = memory_source();
  if (!source->allocate || in_cuda_task()) return nullptr;
  return take_memory<Error>(device, [&] { return source->allocate(device, size, stream); });
}

void* allocate_pinned(Device device, std::size_t size) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, size, cudaHostAllocPortable | cudaHostAllocMapped), device,
             "allocate " + std::to_string(size) + " bytes of pinned host memory");
  return memory;
}

// Words of pinned memory, one per cache line. They are reused, since pinning and unpinning stall
// the GPU.
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
  const DevicePools& pools = pools_of(device);
  cudaStream_t const stream = pools.stream;
  std::shared_ptr<std::byte> memory = from_source(device, size, stream);
  if (memory == nullptr) memory = allocate(device, size, pools.lasting, stream);
  check_cuda(cudaMemsetAsync(memory.get(), 0, size, stream), device, "clear memory");
  check_cuda(cudaStreamSynchronize(stream), device, "clear memory");
  return memory;
}

void free_cuda_after(Device device, const Event& event) {
  const OnCudaDevice current(device);
  DevicePools& pools = pools_of(device);
  // New memory is cleared on a new stream, which need not wait.
  borrow_cuda_queue(device, pools.stream.exchange(make_stream(device)))->wait(event);
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
  return allocate(stream.device(), size, pools_of(stream.device()).scratch,
                  static_cast<cudaStream_t>(stream.native_handle()), stream);
}

std::shared_ptr<void> reserve_cuda_scratch(Device device, std::size_t size) {
  require_cuda(device);
  const OnCudaDevice current(device);
  DevicePools& pools = pools_of(device);
  pools.reserved += size;
  std::shared_ptr<void> reserve(nullptr, [&pools, device, size](void* /*unused*/) {
    pools.reserved -= size;
    give_back_on(device, [&] { keep_scratch(pools, device); });
  });
  keep_scratch(pools, device);
  static_cast<void>(allocate(device, pools.reserved, pools.scratch, pools.stream));
  return reserve;
}

void give_back_unused_memory(Device device) {
  const OnCudaDevice current(device);
  const DevicePools& pools = pools_of(device);
  check_cuda(cudaMemPoolTrimTo(pools.lasting, 0), device, "trim a memory pool");
  check_cuda(cudaMemPoolTrimTo(pools.scratch, pools.reserved), device, "trim a memory pool");
  if (in_cuda_task()) return;
  const auto source = memory_source();
  if (source->give_back_unused) source->give_back_unused(device);
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
