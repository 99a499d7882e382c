#include "cuda_stand_in.h"

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "hsdp/device/stream.h"

// A capture sequence, of all streams that take part.
struct CUgraph_st {
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  CUstream_st* origin;
  bool is_invalid = false;
};

struct CUstream_st {
  int device = 0;
  bool is_legacy = false;
  int priority = 0;
  hsdp::Stream worker = hsdp::Stream::host_worker("stand-in");
  CUgraph_st* capture = nullptr;
};

struct CUevent_st {
  int device = 0;
  hsdp::Event last;
  CUgraph_st* captured = nullptr;  // where it was recorded last
};

struct CUmemPool_st {
  std::int64_t kept = 0;  // of the device's
  std::int64_t used = 0;
};

namespace hsdp::stand_in {
namespace {

struct Machine {
  std::mutex mutex;
  std::condition_variable changed;
  int devices = 2;
  int count_error = 0;
  std::optional<FailingCall> failing_call;
  std::map<std::pair<std::string, int>, std::int64_t> calls;  // by name and device
  int standstills = 0;
  std::int64_t launches = 0;
  struct Memory {
    std::int64_t size;
    std::int64_t taken;  // of its pool
    cudaMemPool_t pool;
  };
  std::map<void*, Memory> memory;
  std::set<void*> graph_memory;  // addresses that only a graph could use
  std::int64_t allocations = 0;
  std::optional<FailingAllocation> failing_allocation;
  std::optional<std::mt19937_64> delays;
  cudaError_t broken = cudaSuccess;        // all devices
  std::map<int, cudaError_t> broken_ones;  // by device
  std::optional<FailingKernel> failing_kernel;
  std::set<int> doomed;        // devices whose kernel has failed, whether or not a call says so yet
  std::map<int, int> running;  // pieces of the devices' own work
  std::set<int> contexts;
  std::set<cudaStream_t> streams;
  std::set<cudaEvent_t> events;
  std::set<CUgraph_st*> captures;
  std::map<int, CUstream_st*> legacy;  // by device
};

Machine& machine() {
  static auto* const one = new Machine;  // outlives the streams of static objects
  return *one;
}

// The machine while its lock is held.
class Locked {
 public:
  Machine* operator->() const { return &machine(); }

 private:
  std::lock_guard<std::mutex> lock_{machine().mutex};
};

constexpr int kHighestPriority = -5;

thread_local int the_current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

// With the lock held. The error that a failed kernel of that device has left.
cudaError_t sticky_error(int device) {
  const Machine& m = machine();
  const auto one = m.broken_ones.find(device);
  return one == m.broken_ones.end() ? m.broken : one->second;
}

// With the lock held. Counts down to the failure that a test asked for.
template <typename Failing>
bool fails_now(std::optional<Failing>& failing) {
  if (!failing || failing->device.value_or(the_current_device) != the_current_device) return false;
  if (--failing->after >= 0) return false;
  if (--failing->times <= 0) failing.reset();
  return true;
}

// What the real runtime leaves undefined: with luck, a crash there.
[[noreturn]] void punish(std::string_view call, std::string_view what) {
  std::fprintf(stderr, "stand-in for CUDA: %.*s: %.*s\n", static_cast<int>(call.size()),
               call.data(), static_cast<int>(what.size()), what.data());
  std::abort();
}

// One call of the runtime that needs a context.
class Call {
 public:
  explicit Call(std::string_view name) : name_(name), lock_(machine().mutex) {
    machine().contexts.insert(the_current_device);
    ++machine().calls[{std::string(name), the_current_device}];
    refuse_as_told();
    refuse_if_broken();
  }

  [[nodiscard]] cudaError_t status() const { return status_; }
  cudaError_t refuse(cudaError_t error) {
    status_ = last_error = error;
    return error;
  }

  // The stream; a null one is the current device's.
  [[nodiscard]] CUstream_st& stream(cudaStream_t stream) const {
    if (stream == nullptr) {
      CUstream_st*& legacy = machine().legacy[the_current_device];
      if (legacy == nullptr) legacy = new CUstream_st{the_current_device, true};
      return *legacy;
    }
    if (!machine().streams.contains(stream)) punish(name_, "a stream that was destroyed");
    return *stream;
  }
  [[nodiscard]] CUevent_st& event(cudaEvent_t event) const {
    if (!machine().events.contains(event)) punish(name_, "an event that was destroyed");
    return *event;
  }

  // A capture cannot record waits and queries.
  bool is_prohibited() {
    bool found = false;
    for (CUgraph_st* const capture : machine().captures) {
      const bool own = capture->thread == std::this_thread::get_id();
      const bool counts = capture_mode == cudaStreamCaptureModeGlobal
                              ? (own ? capture->mode != cudaStreamCaptureModeRelaxed
                                     : capture->mode == cudaStreamCaptureModeGlobal)
                              : capture_mode == cudaStreamCaptureModeThreadLocal && own &&
                                    capture->mode != cudaStreamCaptureModeRelaxed;
      if (!counts) continue;
      capture->is_invalid = true;
      found = true;
    }
    if (found) refuse(cudaErrorStreamCaptureUnsupported);
    return found;
  }
  bool is_captured(CUgraph_st* capture, cudaError_t error) {
    if (capture == nullptr || !machine().captures.contains(capture)) return false;
    invalidate(*capture, error);
    return true;
  }
  // For a query of what is captured, or of anything during a capture that forbids it.
  bool may_not_ask(CUgraph_st* capture, cudaError_t error) {
    return is_captured(capture, error) || is_prohibited();
  }
  // For work into a stream: in a capture it becomes a node of a graph, which nothing launches here.
  cudaError_t captured_status(const CUgraph_st& capture) {
    return capture.is_invalid ? refuse(cudaErrorStreamCaptureInvalidated) : status_;
  }
  // An operation that a capture cannot take ends it, with its error or that of an earlier one.
  cudaError_t invalidate(CUgraph_st& capture, cudaError_t error) {
    const bool was_invalid = std::exchange(capture.is_invalid, true);
    return refuse(was_invalid ? cudaErrorStreamCaptureInvalidated : error);
  }

  // The call's result after `wait`, during which a kernel may fail.
  template <typename Wait>
  cudaError_t status_after(Wait wait) {
    lock_.unlock();
    wait();
    lock_.lock();
    // The work that a failed kernel has ended is done before every call reports the failure.
    machine().changed.wait(lock_, [] {
      return !machine().doomed.contains(the_current_device) ||
             sticky_error(the_current_device) != cudaSuccess;
    });
    refuse_if_broken();
    return status_;
  }

 private:
  void refuse_as_told() {
    std::optional<FailingCall>& failing = machine().failing_call;
    if (!failing || failing->name != name_) return;
    const auto error = static_cast<cudaError_t>(failing->error);
    if (fails_now(failing)) refuse(error);
  }
  void refuse_if_broken() {
    const cudaError_t sticky = sticky_error(the_current_device);
    if (sticky != cudaSuccess) refuse(sticky);
  }

  std::string_view name_;
  std::unique_lock<std::mutex> lock_;
  cudaError_t status_ = cudaSuccess;
};

void wait_as_told() {
  Machine& m = machine();
  std::unique_lock lock(m.mutex);
  if (m.delays) {
    const std::chrono::microseconds pause((*m.delays)() % 4 == 0 ? (*m.delays)() % 1000 : 0);
    lock.unlock();
    std::this_thread::sleep_for(pause);
    lock.lock();
  }
  m.changed.wait(lock, [&m] { return m.standstills == 0; });
}

// Runs the stream's next work, unless a kernel of the device has failed, after which nothing runs.
// A failing kernel ends everything that runs on the device before any call can report it.
void run_on_device(int device, const std::string& name, const std::function<void()>& work) {
  Machine& m = machine();
  std::unique_lock lock(m.mutex);
  if (m.doomed.contains(device) || sticky_error(device) != cudaSuccess) return;
  std::optional<FailingKernel>& failing = m.failing_kernel;
  const bool is_kernel = name == "cudaLaunchKernel";
  if (is_kernel && failing && failing->device == device && --failing->after < 0) {
    failing.reset();
    m.doomed.insert(device);
    m.changed.wait(lock, [&] { return m.running[device] == 0; });
    m.broken_ones[device] = cudaErrorLaunchFailure;
    m.changed.notify_all();
    return;
  }
  const bool is_of_host = name == "cudaLaunchHostFunc";
  if (!is_of_host) ++m.running[device];
  lock.unlock();
  work();
  lock.lock();
  if (!is_of_host) --m.running[device];
  lock.unlock();
  m.changed.notify_all();
}

// For memory that the device or the host has to find first, which may fail.
bool find_memory(Call& call, std::size_t size) {
  ++machine().allocations;
  constexpr std::size_t kMostBytes = std::size_t{16} << 30U;
  if (!fails_now(machine().failing_allocation) && size <= kMostBytes) return true;
  call.refuse(cudaErrorMemoryAllocation);
  return false;
}

void* make_memory(std::size_t size) {
  constexpr std::size_t kAlignment = 256;
  void* const memory =
      std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0xff, size);
  return memory;
}

// For memory that exists once a graph is launched.
void* make_addresses(std::size_t size) {
  void* const begin = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) throw std::bad_alloc();
  return begin;
}

int primary_context_state(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = Locked()->contexts.contains(device) ? 1 : 0;
  return 0;
}

}  // namespace

void set_devices(int count, int error) {
  const Locked m;
  m->devices = count;
  m->count_error = error;
}

void fail_call(std::optional<FailingCall> which) { Locked()->failing_call = std::move(which); }
void fail_allocation(std::optional<FailingAllocation> which) {
  Locked()->failing_allocation = which;
}
void fail_kernel(std::optional<FailingKernel> which) { Locked()->failing_kernel = which; }

void break_devices(int error) {
  const Locked m;
  m->broken = last_error = static_cast<cudaError_t>(error);
  if (error != 0) return;
  m->broken_ones.clear();
  m->doomed.clear();
}

void delay_work(std::optional<std::uint64_t> seed) {
  const Locked m;
  m->delays.reset();
  if (seed) m->delays.emplace(*seed);
}

Standstill::Standstill() { ++Locked()->standstills; }
Standstill::~Standstill() {
  --Locked()->standstills;
  machine().changed.notify_all();
}

bool begin_capture(void* stream, bool of_all_threads) {
  const auto mode = of_all_threads ? cudaStreamCaptureModeGlobal : cudaStreamCaptureModeThreadLocal;
  return cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), mode) == cudaSuccess;
}

bool end_capture(void* stream) {
  cudaGraph_t graph = nullptr;
  return cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph) == cudaSuccess;
}

std::int64_t call_count(const std::string& name, int device) {
  return Locked()->calls[{name, device}];
}
std::map<std::string, std::int64_t> call_counts(int device) {
  const Locked m;
  std::map<std::string, std::int64_t> counts;
  for (const auto& [call, count] : m->calls) {
    if (call.second == device) counts.emplace(call.first, count);
  }
  return counts;
}
std::int64_t allocation_count() { return Locked()->allocations; }
std::int64_t kernel_launches() { return Locked()->launches; }
std::int64_t allocated_bytes() {
  const Locked m;
  std::int64_t bytes = 0;
  for (const auto& [_, memory] : m->memory) bytes += memory.size;
  return bytes;
}
int current_device() { return the_current_device; }
std::set<int> contexts() { return Locked()->contexts; }
void forget_contexts() { Locked()->contexts.clear(); }

bool is_broken(int device) {
  const Locked m;
  return m->doomed.contains(device) || sticky_error(device) != cudaSuccess;
}

cudaError_t enqueue(const char* name, cudaStream_t handle, std::function<void()> work) {
  Call call(name);
  if (call.status() != cudaSuccess) return call.status();
  CUstream_st& stream = call.stream(handle);
  const bool is_kernel = std::string_view(name) == "cudaLaunchKernel";
  const bool launches = is_kernel || std::string_view(name) == "ncclGroupEnd";
  if (launches && stream.device != the_current_device) {
    return call.refuse(cudaErrorInvalidResourceHandle);
  }
  if (is_kernel) ++machine().launches;
  if (stream.capture != nullptr) return call.captured_status(*stream.capture);
  stream.worker.run([work = std::move(work), device = stream.device, name = std::string(name)] {
    wait_as_told();
    run_on_device(device, name, work);
  });
  return cudaSuccess;
}

}  // namespace hsdp::stand_in

using namespace hsdp::stand_in;  // NOLINT(google-build-using-namespace): the runtime is global

cudaError_t cudaGetLastError() {
  const Locked m;
  return std::exchange(last_error, sticky_error(the_current_device));
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
  const Locked m;
  *count = m->devices;
  return last_error = static_cast<cudaError_t>(m->count_error);
}

cudaError_t cudaGetDevice(int* device) {
  *device = the_current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  the_current_device = device;
  return Call("cudaSetDevice").status();
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr /*attribute*/, int /*device*/) {
  *value = 3;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                             unsigned /*version*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* status) {
  if (status != nullptr) *status = cudaDriverEntryPointSuccess;
  const bool is_known = std::string_view(symbol) == "cuDevicePrimaryCtxGetState";
  *function = is_known ? reinterpret_cast<void*>(&primary_context_state) : nullptr;
  return is_known ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned /*flags*/, int priority) {
  const Call call("cudaStreamCreateWithPriority");
  if (call.status() != cudaSuccess) return call.status();
  *stream = new CUstream_st{the_current_device};
  (*stream)->priority = std::clamp(priority, kHighestPriority, 0);
  machine().streams.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = kHighestPriority;
  return Call("cudaDeviceGetStreamPriorityRange").status();
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  Call call("cudaStreamGetPriority");
  if (call.status() == cudaSuccess) *priority = call.stream(handle).priority;
  return call.status();
}

// Does not wait: the thread ends when its work is done.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Call call("cudaStreamDestroy");
  CUstream_st* const stream = &call.stream(handle);
  machine().streams.erase(handle);
  call.is_captured(stream->capture, cudaErrorStreamCaptureUnsupported);
  hsdp::Stream worker = stream->worker;
  return call.status_after([&] { worker.run([stream] { delete stream; }); });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Call call("cudaStreamSynchronize");
  CUstream_st& stream = call.stream(handle);
  if (call.may_not_ask(stream.capture, cudaErrorStreamCaptureUnsupported)) return call.status();
  hsdp::Stream worker = stream.worker;
  return call.status_after([&] { worker.synchronize(); });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Call call("cudaStreamQuery");
  CUstream_st& stream = call.stream(handle);
  if (call.may_not_ask(stream.capture, cudaErrorStreamCaptureUnsupported)) return call.status();
  if (call.status() != cudaSuccess) return call.status();
  return stream.worker.record().complete() ? cudaSuccess : call.refuse(cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  Call call("cudaStreamWaitEvent");
  CUstream_st& stream = call.stream(handle);
  const CUevent_st& event = call.event(event_handle);
  const bool is_captured = event.captured != nullptr && machine().captures.contains(event.captured);
  if (stream.capture != nullptr && stream.capture != event.captured) {
    if (!is_captured) return call.invalidate(*stream.capture, cudaErrorStreamCaptureIsolation);
    call.invalidate(*event.captured, cudaErrorStreamCaptureMerge);
    return call.invalidate(*stream.capture, cudaErrorStreamCaptureMerge);
  }
  if (is_captured) {
    if (stream.is_legacy) return call.refuse(cudaErrorStreamCaptureImplicit);
    stream.capture = event.captured;  // takes part from here on
  } else {
    stream.worker.wait(event.last);
  }
  return call.status();
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  const Call call("cudaStreamGetDevice");
  *device = call.stream(handle).device;
  return call.status();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  const Call call("cudaStreamIsCapturing");
  const CUgraph_st* const capture = call.stream(handle).capture;
  *status = capture == nullptr    ? cudaStreamCaptureStatusNone
            : capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
  return call.status();
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Call call("cudaStreamBeginCapture");
  CUstream_st& stream = call.stream(handle);
  if (stream.is_legacy) return call.refuse(cudaErrorStreamCaptureUnsupported);
  stream.capture = new CUgraph_st{mode, std::this_thread::get_id(), &stream};
  machine().captures.insert(stream.capture);
  return call.status();
}

// Nothing launches graphs here: the result is whether the capture is whole.
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Call call("cudaStreamEndCapture");
  CUgraph_st* const capture = call.stream(handle).capture;
  if (capture == nullptr || capture->origin != handle) return call.refuse(cudaErrorInvalidValue);
  for (CUstream_st* const stream : machine().streams) {
    if (stream->capture == capture) stream->capture = nullptr;
  }
  for (CUevent_st* const event : machine().events) {
    if (event->captured == capture) event->captured = nullptr;
  }
  machine().captures.erase(capture);
  const bool is_invalid = capture->is_invalid;
  delete capture;
  *graph = nullptr;
  return is_invalid ? call.refuse(cudaErrorStreamCaptureInvalidated) : call.status();
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  const Call call("cudaEventCreateWithFlags");
  if (call.status() != cudaSuccess) return call.status();
  *event = new CUevent_st{the_current_device};
  machine().events.insert(*event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t handle) {
  Call call("cudaEventRecord");
  if (call.status() != cudaSuccess) return call.status();
  CUstream_st& stream = call.stream(handle);
  CUevent_st& event = call.event(event_handle);
  if (stream.device != event.device) return call.refuse(cudaErrorInvalidResourceHandle);
  event.captured = stream.capture;
  if (stream.capture != nullptr) return call.captured_status(*stream.capture);
  stream.worker.run(wait_as_told);
  event.last = stream.worker.record();
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Call call("cudaEventQuery");
  const CUevent_st& event = call.event(handle);
  if (call.may_not_ask(event.captured, cudaErrorCapturedEvent)) return call.status();
  if (call.status() != cudaSuccess) return call.status();
  return event.last.complete() ? cudaSuccess : call.refuse(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Call call("cudaEventSynchronize");
  const CUevent_st& event = call.event(handle);
  if (call.may_not_ask(event.captured, cudaErrorCapturedEvent)) return call.status();
  const hsdp::Event last = event.last;
  return call.status_after([&] { last.wait(); });
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Call call("cudaEventDestroy");
  CUevent_st* const event = &call.event(handle);
  machine().events.erase(handle);
  delete event;
  return call.status();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return enqueue("cudaLaunchHostFunc", stream, [function, argument] { function(argument); });
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* /*properties*/) {
  const Call call("cudaMemPoolCreate");
  if (call.status() == cudaSuccess) *pool = new CUmemPool_st;  // of the process, as ours are
  return call.status();
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t /*pool*/, cudaMemPoolAttr /*attribute*/,
                                    void* /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t kept) {
  Call call("cudaMemPoolTrimTo");
  if (call.status() != cudaSuccess) return call.status();
  pool->kept = std::min(pool->kept, std::max(pool->used, static_cast<std::int64_t>(kept)));
  return cudaSuccess;
}

// What a pool keeps is used again behind any free that is in a stream.
cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t size, cudaMemPool_t pool,
                                    cudaStream_t stream) {
  constexpr std::int64_t kGranularity = 512;
  Call call("cudaMallocFromPoolAsync");
  if (call.status() != cudaSuccess) return call.status();
  if (CUgraph_st* const capture = call.stream(stream).capture) {  // a node: the pool has no part
    if (capture->is_invalid) return call.refuse(cudaErrorStreamCaptureInvalidated);
    machine().graph_memory.insert(*memory = make_addresses(size));
    return call.status();
  }
  const std::int64_t taken =
      (static_cast<std::int64_t>(size) + kGranularity - 1) / kGranularity * kGranularity;
  if (pool->used + taken > pool->kept && !find_memory(call, size)) return call.status();
  *memory = make_memory(size);
  pool->used += taken;
  pool->kept = std::max(pool->kept, pool->used);
  machine().memory[*memory] = {static_cast<std::int64_t>(size), taken, pool};
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  {
    Call call("cudaFreeAsync");
    const bool is_of_graph = machine().graph_memory.contains(memory);
    if (CUgraph_st* const capture = call.stream(stream).capture) {
      return is_of_graph ? call.status() : call.invalidate(*capture, cudaErrorInvalidValue);
    }
    if (is_of_graph) return call.refuse(cudaErrorInvalidValue);  // nothing has launched it
    const auto place = machine().memory.find(memory);
    if (place == machine().memory.end()) punish("cudaFreeAsync", "memory that was freed");
    place->second.pool->used -= std::exchange(place->second.taken, 0);
  }
  return enqueue("cudaFreeAsync", stream, [memory] {
    const Locked m;
    const auto place = m->memory.find(memory);
    if (place == m->memory.end()) punish("cudaFreeAsync", "memory that was freed");
    std::memset(memory, 0xff, static_cast<std::size_t>(place->second.size));
    m->memory.erase(place);
    std::free(memory);
  });
}

cudaError_t cudaHostAlloc(void** memory, std::size_t size, unsigned /*flags*/) {
  Call call("cudaHostAlloc");
  if (call.status() != cudaSuccess || call.is_prohibited()) return call.status();
  if (find_memory(call, size)) *memory = make_memory(size);
  return call.status();
}

cudaError_t cudaFreeHost(void* memory) {
  Call call("cudaFreeHost");
  if (call.status() != cudaSuccess || call.is_prohibited()) return call.status();
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
