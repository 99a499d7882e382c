#include "cuda_stand_in.h"

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "hsdp/device/stream.h"

struct CUstream_st {
  hsdp::Stream worker = hsdp::Stream::host_worker("stand-in");
};

struct CUevent_st {
  std::mutex mutex;
  hsdp::Event last;
};

struct CUmemPool_st {};

namespace hsdp::stand_in {
namespace {

struct Machine {
  std::mutex mutex;
  std::condition_variable changed;
  int devices = 2;
  int count_error = 0;
  std::map<std::string, int> failures;
  int standstills = 0;
  std::int64_t launches = 0;
  std::map<void*, std::size_t> memory;
  cudaError_t last_error = cudaSuccess;
};

Machine& machine() {
  static auto* const one = new Machine;  // outlives the streams of static objects
  return *one;
}

thread_local int the_current_device = 0;

CUstream_st& stream_of(cudaStream_t stream) {
  static auto* const legacy = new CUstream_st;
  return stream == nullptr ? *legacy : *stream;
}

cudaError_t status_of(const char* call) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  const auto failure = m.failures.find(call);
  if (failure == m.failures.end()) return cudaSuccess;
  return m.last_error = static_cast<cudaError_t>(failure->second);
}

void wait_while_standing_still() {
  Machine& m = machine();
  std::unique_lock lock(m.mutex);
  m.changed.wait(lock, [&m] { return m.standstills == 0; });
}

}  // namespace

void set_devices(int count, int error) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  m.devices = count;
  m.count_error = error;
}

void fail(const std::string& call, int error) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (error == 0) {
    m.failures.erase(call);
  } else {
    m.failures[call] = error;
  }
}

Standstill::Standstill() {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  ++m.standstills;
}

Standstill::~Standstill() {
  Machine& m = machine();
  {
    const std::lock_guard lock(m.mutex);
    --m.standstills;
  }
  m.changed.notify_all();
}

std::int64_t kernel_launches() {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  return m.launches;
}

std::int64_t allocated_bytes() {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  std::int64_t bytes = 0;
  for (const auto& [memory, size] : m.memory) bytes += static_cast<std::int64_t>(size);
  return bytes;
}

int current_device() { return the_current_device; }

cudaError_t enqueue(const char* call, cudaStream_t stream, std::function<void()> work) {
  if (const cudaError_t status = status_of(call)) return status;
  if (std::string(call) == "cudaLaunchKernel") {
    const std::lock_guard lock(machine().mutex);
    ++machine().launches;
  }
  stream_of(stream).worker.run([work = std::move(work)] {
    wait_while_standing_still();
    work();
  });
  return cudaSuccess;
}

}  // namespace hsdp::stand_in

using namespace hsdp::stand_in;  // NOLINT(google-build-using-namespace): the runtime is global

cudaError_t cudaGetLastError() {
  const std::lock_guard lock(machine().mutex);
  return std::exchange(machine().last_error, cudaSuccess);
}

const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfStandIn";
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaErrorInsufficientDriver) return "driver version is insufficient";
  return "an error that a test asked for";
}

cudaError_t cudaGetDeviceCount(int* count) {
  const std::lock_guard lock(machine().mutex);
  *count = machine().devices;
  return machine().last_error = static_cast<cudaError_t>(machine().count_error);
}

cudaError_t cudaGetDevice(int* device) {
  *device = the_current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  the_current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr /*attribute*/, int /*device*/) {
  *value = 3;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  if (const cudaError_t status = status_of("cudaStreamCreateWithFlags")) return status;
  *stream = new CUstream_st;
  return cudaSuccess;
}

// Does not wait: the thread goes when its work is done.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  hsdp::Stream worker = stream->worker;
  worker.run([stream] { delete stream; });
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream_of(stream).worker.synchronize();
  return status_of("cudaStreamSynchronize");
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  const std::lock_guard lock(event->mutex);
  stream_of(stream).worker.wait(event->last);
  return status_of("cudaStreamWaitEvent");
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const cudaError_t status = enqueue("cudaEventRecord", stream, [] {})) return status;
  const std::lock_guard lock(event->mutex);
  event->last = stream_of(stream).worker.record();
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard lock(event->mutex);
  return event->last.complete() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  hsdp::Event last;
  {
    const std::lock_guard lock(event->mutex);
    last = event->last;
  }
  last.wait();
  return status_of("cudaEventSynchronize");
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return enqueue("cudaLaunchHostFunc", stream, [function, argument] { function(argument); });
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* /*properties*/) {
  static CUmemPool_st only;
  *pool = &only;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t /*pool*/, cudaMemPoolAttr /*attribute*/,
                                    void* /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t size, cudaMemPool_t /*pool*/,
                                    cudaStream_t /*stream*/) {
  if (const cudaError_t status = status_of("cudaMallocFromPoolAsync")) return status;
  constexpr std::size_t kAlignment = 256;
  constexpr std::size_t kMostBytes = std::size_t{16} << 30U;
  if (size > kMostBytes) return machine().last_error = cudaErrorMemoryAllocation;
  *memory = std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xcb, size);
  const std::lock_guard lock(machine().mutex);
  machine().memory[*memory] = size;
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  return enqueue("cudaFreeAsync", stream, [memory] {
    const std::lock_guard lock(machine().mutex);
    const auto place = machine().memory.find(memory);
    std::memset(memory, 0xdd, place->second);
    machine().memory.erase(place);
    std::free(memory);
  });
}

cudaError_t cudaHostAlloc(void** memory, std::size_t size, unsigned /*flags*/) {
  if (const cudaError_t status = status_of("cudaHostAlloc")) return status;
  *memory = std::malloc(size);
  return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  if (const cudaError_t status = status_of("cudaFreeHost")) return status;
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t size, cudaStream_t stream) {
  return enqueue("cudaMemsetAsync", stream,
                 [memory, value, size] { std::memset(memory, value, size); });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  return enqueue("cudaMemcpyAsync", stream, [to, from, size] { std::memcpy(to, from, size); });
}
