// What the stand-in for the CUDA runtime refuses or punishes, and where the documentation says that
// the real one does: the Programming Guide (PG, CUDA 13.0) and the comments of cuda_runtime_api.h
// (API).
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "cuda_runtime.h"
#include "cuda_stand_in.h"

namespace hsdp {
namespace {

cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  return stream;
}

cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  return event;
}

cudaMemPool_t make_pool() {
  cudaMemPool_t pool = nullptr;
  const cudaMemPoolProps properties{};
  EXPECT_EQ(cudaMemPoolCreate(&pool, &properties), cudaSuccess);
  return pool;
}

void* allocate(std::size_t size, cudaStream_t stream, cudaMemPool_t pool = make_pool()) {
  void* memory = nullptr;
  EXPECT_EQ(cudaMallocFromPoolAsync(&memory, size, pool, stream), cudaSuccess);
  return memory;
}

cudaError_t launch(cudaStream_t stream) {
  return stand_in::enqueue("cudaLaunchKernel", stream, [] {});
}

void begin_capture(cudaStream_t stream, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
  EXPECT_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
}

cudaError_t end_capture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  return cudaStreamEndCapture(stream, &graph);
}

cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  return status;
}

class CudaRules : public ::testing::Test {
 protected:
  CudaRules() { ::testing::GTEST_FLAG(death_test_style) = "threadsafe"; }
  ~CudaRules() override {
    stand_in::break_devices(0);
    stand_in::fail_kernel(std::nullopt);
    stand_in::fail_allocation(std::nullopt);
    stand_in::fail_call(std::nullopt);
    stand_in::delay_work({});
    for (cudaStream_t const stream : streams_) EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    for (cudaEvent_t const event : events_) EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    cudaSetDevice(0);
    static_cast<void>(cudaGetLastError());
  }

  // Destroyed at the end of the test.
  cudaStream_t new_stream() { return streams_.emplace_back(make_stream()); }
  cudaEvent_t new_event() { return events_.emplace_back(make_event()); }

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
};

// PG, Multi-Device System, Stream and Event Behavior.
TEST_F(CudaRules, AKernelGoesToAStreamOfTheCurrentDevice) {
  cudaStream_t const stream = new_stream();
  EXPECT_EQ(launch(stream), cudaSuccess);
  cudaSetDevice(1);
  EXPECT_EQ(launch(stream), cudaErrorInvalidResourceHandle);
  std::array<int, 2> copied{7, 0};
  EXPECT_EQ(cudaMemcpyAsync(&copied[1], copied.data(), sizeof(int), cudaMemcpyDefault, stream),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(copied[1], 7);
}

// The same section.
TEST_F(CudaRules, AnEventIsRecordedOnItsOwnDeviceAndWaitedForOnAny) {
  cudaStream_t const stream = new_stream();
  cudaEvent_t const event = new_event();
  cudaSetDevice(1);
  cudaStream_t const other = new_stream();
  EXPECT_EQ(cudaEventRecord(event, other), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
}

// API, cudaSetDevice and "Interactions with the CUDA Driver API": a context at the first call that
// requires one, and by cudaSetDevice itself.
TEST_F(CudaRules, CallsMakeAContextOnTheCurrentDevice) {
  int count = 0;
  const std::vector<void (*)()> calls{
      [] { cudaSetDevice(1); },
      [] { cudaStreamDestroy(make_stream()); },
      [] { cudaEventDestroy(make_event()); },
      [] {
        cudaStream_t const stream = make_stream();
        cudaFreeAsync(allocate(8, stream), stream);
        cudaStreamDestroy(stream);
      },
  };
  for (const auto call : calls) {
    cudaSetDevice(1);
    stand_in::forget_contexts();
    int device = 0;
    EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(stand_in::contexts(), std::set<int>{});
    call();
    EXPECT_EQ(stand_in::contexts(), std::set<int>{1});
  }
}

// The same section: the thread's device counts, and a thread begins with device 0.
TEST_F(CudaRules, AnotherThreadHasADeviceOfItsOwn) {
  cudaSetDevice(1);
  cudaEvent_t const event = new_event();
  stand_in::forget_contexts();
  std::thread([event] { EXPECT_EQ(cudaEventQuery(event), cudaSuccess); }).join();
  EXPECT_EQ(stand_in::contexts(), std::set<int>{0});
}

using CudaRulesDeathTest = CudaRules;

// API, cudaStreamDestroy and cudaEventDestroy: "the handle must not be accessed after this call".
TEST_F(CudaRulesDeathTest, WhatWasDestroyedIsNotUsed) {
  EXPECT_DEATH(
      {
        cudaStream_t const stream = make_stream();
        cudaStreamDestroy(stream);
        cudaStreamSynchronize(stream);
      },
      "cudaStreamSynchronize: a stream that was destroyed");
  EXPECT_DEATH(
      {
        cudaEvent_t const event = make_event();
        cudaEventDestroy(event);
        cudaEventRecord(event, nullptr);
      },
      "cudaEventRecord: an event that was destroyed");
}

// API, cudaStreamDestroy: "in case the device is still doing work in the stream, the function will
// return immediately and the resources will be released automatically".
TEST_F(CudaRules, WorkOutlivesTheHandleOfItsStream) {
  bool ran = false;
  cudaEvent_t const done = make_event();
  {
    const stand_in::Standstill nothing_moves;
    cudaStream_t const stream = make_stream();
    stand_in::enqueue("cudaMemsetAsync", stream, [&ran] { ran = true; });
    EXPECT_EQ(cudaEventRecord(done, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }
  EXPECT_EQ(cudaEventSynchronize(done), cudaSuccess);
  EXPECT_TRUE(ran);
  cudaEventDestroy(done);
}

// PG, Error Checking; API, cudaErrorLaunchFailure: "This leaves the process in an inconsistent
// state and any further CUDA work will return the same error."
TEST_F(CudaRules, AfterAKernelThatFailedEveryCallFails) {
  cudaStream_t const stream = make_stream();
  cudaEvent_t const event = make_event();
  stand_in::break_devices(cudaErrorLaunchFailure);
  EXPECT_EQ(launch(stream), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaEventRecord(event, stream), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
  void* memory = nullptr;
  EXPECT_EQ(cudaMallocFromPoolAsync(&memory, 8, nullptr, stream), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure) << "asking does not mend it";
  EXPECT_EQ(cudaEventDestroy(event), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorLaunchFailure);
}

// API, cudaStreamSynchronize and cudaEventSynchronize: "may also return error codes from previous,
// asynchronous launches"; here from one that fails while the host waits.
TEST_F(CudaRules, AWaitEndsWithTheErrorOfAKernelThatFailsMeanwhile) {
  const std::vector<cudaError_t (*)(cudaStream_t, cudaEvent_t)> waits{
      [](cudaStream_t stream, cudaEvent_t) { return cudaStreamSynchronize(stream); },
      [](cudaStream_t, cudaEvent_t event) { return cudaEventSynchronize(event); }};
  for (const auto wait : waits) {
    cudaStream_t const stream = new_stream();
    cudaEvent_t const event = new_event();
    std::optional<stand_in::Standstill> nothing_moves(std::in_place);
    stand_in::fail_kernel({{.device = 0}});
    EXPECT_EQ(launch(stream), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
    std::thread waiting([&] { EXPECT_EQ(wait(stream, event), cudaErrorLaunchFailure); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    nothing_moves.reset();
    waiting.join();
    stand_in::break_devices(0);
  }
}

// API, cudaErrorLaunchFailure, as above; cudaLaunchHostFunc: "the function will not be called in
// the event of an error in the CUDA context".
TEST_F(CudaRules, WhatIsQueuedBehindAKernelThatFailedDoesNotRun) {
  cudaStream_t const stream = new_stream();
  cudaStream_t const other = new_stream();
  cudaEvent_t const failed = new_event();
  bool ran = false;
  const auto run = [](void* flag) { *static_cast<bool*>(flag) = true; };
  stand_in::fail_kernel({{.device = 0, .after = 1}});
  {
    const stand_in::Standstill nothing_moves;
    bool* const place = &ran;
    stand_in::enqueue("cudaLaunchKernel", stream, [] {});
    stand_in::enqueue("cudaLaunchKernel", stream, [place] { *place = true; });
    cudaEventRecord(failed, stream);
    cudaStreamWaitEvent(other, failed, 0);
    for (cudaStream_t const each : {stream, other}) {
      stand_in::enqueue("cudaLaunchKernel", each, [place] { *place = true; });
      cudaMemsetAsync(place, 1, sizeof(bool), each);
      cudaLaunchHostFunc(each, run, place);
    }
  }
  EXPECT_EQ(cudaStreamSynchronize(other), cudaErrorLaunchFailure);
  EXPECT_FALSE(ran);
}

// PG, Error Checking: the error belongs to the context, of which a device has one in each process.
// The ranks of a test would be processes elsewhere.
TEST_F(CudaRules, AKernelThatFailedBreaksItsDeviceOnly) {
  cudaStream_t const stream = new_stream();
  stand_in::fail_kernel({{.device = 0}});
  EXPECT_EQ(launch(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
  EXPECT_EQ(launch(stream), cudaErrorLaunchFailure);
  cudaSetDevice(1);
  cudaStream_t const other = new_stream();
  bool ran = false;
  EXPECT_EQ(stand_in::enqueue("cudaLaunchKernel", other, [&ran] { ran = true; }), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  EXPECT_TRUE(ran);
}

// API, cudaStreamBeginCapture: work that is pushed into the stream is not executed.
TEST_F(CudaRules, ACapturedStreamExecutesNothing) {
  cudaStream_t const stream = new_stream();
  bool ran = false;
  std::array<int, 2> words{7, 8};
  begin_capture(stream);
  EXPECT_EQ(stand_in::enqueue("cudaLaunchKernel", stream, [&ran] { ran = true; }), cudaSuccess);
  EXPECT_EQ(cudaLaunchHostFunc(
                stream, [](void* flag) { *static_cast<bool*>(flag) = true; }, &ran),
            cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(words.data(), 0, sizeof(int), stream), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(&words[1], words.data(), sizeof(int), cudaMemcpyDefault, stream),
            cudaSuccess);
  EXPECT_EQ(status_of(stream), cudaStreamCaptureStatusActive);
  EXPECT_EQ(end_capture(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_FALSE(ran);
  EXPECT_EQ(words, (std::array<int, 2>{7, 8}));
}

// API, cudaMallocFromPoolAsync: "During stream capture, this function results in the creation of an
// allocation node", which owns the memory instead of the pool; cudaFreeAsync "must therefore be
// passed the address of a graph allocation".
TEST_F(CudaRules, AnAllocationOfACaptureTakesNothingFromThePool) {
  cudaStream_t const stream = new_stream();
  cudaMemPool_t const pool = make_pool();
  void* const before = allocate(8, stream, pool);
  const std::int64_t bytes = stand_in::allocated_bytes();
  const std::int64_t count = stand_in::allocation_count();
  begin_capture(stream);
  void* const of_graph = allocate(2000, stream, pool);
  void* const kept = allocate(2000, stream, pool);
  EXPECT_EQ(cudaFreeAsync(of_graph, stream), cudaSuccess);
  EXPECT_EQ(stand_in::allocated_bytes(), bytes);
  EXPECT_EQ(stand_in::allocation_count(), count);
  EXPECT_EQ(end_capture(stream), cudaSuccess);
  EXPECT_EQ(cudaFreeAsync(kept, stream), cudaErrorInvalidValue) << "nobody launched the graph";
  begin_capture(stream);
  EXPECT_EQ(cudaFreeAsync(before, stream), cudaErrorInvalidValue);
  EXPECT_EQ(end_capture(stream), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(stand_in::allocated_bytes(), bytes);
  EXPECT_EQ(cudaFreeAsync(before, stream), cudaSuccess);
}

// The same note: the memory does not exist before the graph is launched.
TEST_F(CudaRulesDeathTest, MemoryOfACaptureIsNotThere) {
  EXPECT_DEATH(
      {
        cudaStream_t const stream = make_stream();
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
        std::memset(allocate(8, stream), 0, 8);
      },
      "");
}

// PG, Stream Capture, Prohibited and Unhandled Operations: asking for, or waiting for, a stream or
// an event that is captured invalidates the capture, in every mode.
TEST_F(CudaRules, AskingForWhatIsCapturedInvalidatesTheCapture) {
  cudaStream_t const stream = new_stream();
  cudaEvent_t const event = new_event();
  const std::vector<cudaError_t (*)(cudaStream_t, cudaEvent_t)> calls{
      [](cudaStream_t asked, cudaEvent_t) { return cudaStreamSynchronize(asked); },
      [](cudaStream_t, cudaEvent_t asked) { return cudaEventQuery(asked); },
      [](cudaStream_t, cudaEvent_t asked) { return cudaEventSynchronize(asked); }};
  for (const auto call : calls) {
    begin_capture(stream, cudaStreamCaptureModeRelaxed);
    EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
    EXPECT_NE(call(stream, event), cudaSuccess);
    EXPECT_EQ(status_of(stream), cudaStreamCaptureStatusInvalidated);
    EXPECT_EQ(end_capture(stream), cudaErrorStreamCaptureInvalidated);
  }
}

// API, cudaThreadExchangeStreamCaptureMode: potentially unsafe calls of other threads, unless
// theirs is relaxed.
TEST_F(CudaRules, AGlobalCaptureForbidsOtherThreadsToAsk) {
  cudaStream_t const stream = new_stream();
  cudaEvent_t const event = new_event();
  for (const bool is_relaxed : {true, false}) {
    begin_capture(stream);
    std::thread([&] {
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      if (is_relaxed) cudaThreadExchangeStreamCaptureMode(&mode);
      EXPECT_EQ(cudaEventQuery(event),
                is_relaxed ? cudaSuccess : cudaErrorStreamCaptureUnsupported);
    }).join();
    EXPECT_EQ(end_capture(stream), is_relaxed ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
  }
}

// PG, Stream Capture, Cross-stream Dependencies and Events.
TEST_F(CudaRules, AStreamThatWaitsForACapturedEventIsCapturedToo) {
  cudaStream_t const stream = new_stream();
  cudaStream_t const other = new_stream();
  cudaEvent_t const event = new_event();
  begin_capture(stream, cudaStreamCaptureModeThreadLocal);
  EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
  EXPECT_EQ(status_of(other), cudaStreamCaptureStatusActive);
  EXPECT_EQ(cudaStreamWaitEvent(nullptr, event, 0), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(end_capture(stream), cudaSuccess);
}

// API, cudaErrorStreamCaptureIsolation: "Only implicit in-stream ordering dependencies are allowed
// to cross the boundary"; PG, Prohibited and Unhandled Operations: also of an event that is over
// long since, and the capture is invalid then.
TEST_F(CudaRules, ACapturedStreamDoesNotWaitForAnEventFromOutside) {
  cudaStream_t const stream = new_stream();
  cudaStream_t const other = new_stream();
  cudaEvent_t const event = new_event();
  EXPECT_EQ(cudaEventRecord(event, other), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  begin_capture(stream, cudaStreamCaptureModeRelaxed);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaEventRecord(event, stream), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(launch(stream), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(end_capture(stream), cudaErrorStreamCaptureInvalidated);
}

// PG, Prohibited and Unhandled Operations: an event of one capture does not merge it with another.
TEST_F(CudaRules, AnEventDoesNotJoinTwoCaptures) {
  cudaStream_t const stream = new_stream();
  cudaStream_t const other = new_stream();
  cudaEvent_t const event = new_event();
  begin_capture(stream, cudaStreamCaptureModeRelaxed);
  begin_capture(other, cudaStreamCaptureModeRelaxed);
  EXPECT_EQ(cudaEventRecord(event, other), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaErrorStreamCaptureMerge);
  EXPECT_EQ(end_capture(stream), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(end_capture(other), cudaErrorStreamCaptureInvalidated);
}

// API, cudaMallocFromPoolAsync and cudaHostAlloc: cudaErrorMemoryAllocation, and nothing else
// changes.
TEST_F(CudaRules, AnyAllocationMayFail) {
  cudaStream_t const stream = new_stream();
  void* memory = nullptr;
  stand_in::fail_allocation({{.after = 1, .times = 1}});
  EXPECT_EQ(cudaHostAlloc(&memory, 8, 0), cudaSuccess);
  cudaFreeHost(memory);
  EXPECT_EQ(cudaMallocFromPoolAsync(&memory, 8, make_pool(), stream), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  cudaFreeAsync(allocate(8, stream), stream);
}

// API, cudaStreamCreateWithPriority, cudaEventCreateWithFlags, cudaMemPoolCreate, cudaHostAlloc:
// each may find no memory, which an event or a stream takes, too.
TEST_F(CudaRules, WhateverIsMadeMayFail) {
  struct Made {
    const char* name;
    cudaError_t (*make)();
  };
  static cudaStream_t stream = nullptr;
  static cudaEvent_t event = nullptr;
  static cudaMemPool_t pool = nullptr;
  static void* memory = nullptr;
  const std::vector<Made> all{
      {"cudaStreamCreateWithPriority",
       [] { return cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); }},
      {"cudaEventCreateWithFlags",
       [] { return cudaEventCreateWithFlags(&event, cudaEventDisableTiming); }},
      {"cudaMemPoolCreate",
       [] {
         const cudaMemPoolProps properties{};
         return cudaMemPoolCreate(&pool, &properties);
       }},
      {"cudaHostAlloc", [] { return cudaHostAlloc(&memory, 8, 0); }}};
  for (const Made& made : all) {
    const std::int64_t before = stand_in::call_count(made.name, 0);
    stand_in::fail_call(
        {{.name = made.name, .error = cudaErrorMemoryAllocation, .after = 1, .device = 0}});
    cudaSetDevice(1);
    EXPECT_EQ(made.make(), cudaSuccess) << made.name;
    cudaSetDevice(0);
    EXPECT_EQ(made.make(), cudaSuccess) << made.name;
    EXPECT_EQ(made.make(), cudaErrorMemoryAllocation) << made.name;
    EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation) << made.name;
    EXPECT_EQ(made.make(), cudaSuccess) << made.name;
    EXPECT_EQ(stand_in::call_count(made.name, 0), before + 3) << made.name;
  }
}

// PG, Stream Ordered Memory Allocator: a pool reuses the memory it keeps, also on another stream,
// after the free on the first (cudaMemPoolReuseAllowInternalDependencies). Only growth may fail.
TEST_F(CudaRules, APoolFailsOnlyWhereItGrows) {
  cudaStream_t const stream = new_stream();
  cudaMemPool_t const pool = make_pool();
  void* const first = allocate(2000, stream, pool);
  cudaFreeAsync(first, stream);
  const std::int64_t before = stand_in::allocation_count();
  stand_in::fail_allocation({{.times = 1}});
  void* const second = allocate(1000, stream, pool);
  void* third = allocate(1000, stream, pool);
  EXPECT_EQ(stand_in::allocation_count(), before);
  EXPECT_EQ(cudaMallocFromPoolAsync(&third, 1, pool, stream), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  cudaFreeAsync(second, stream);
  cudaFreeAsync(third, stream);
  EXPECT_EQ(cudaMemPoolTrimTo(pool, 0), cudaSuccess);
  stand_in::fail_allocation({{.times = 1}});
  EXPECT_EQ(cudaMallocFromPoolAsync(&third, 1, pool, stream), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
}

// API, cudaMallocAsync and cudaHostAlloc: the memory is not initialized; PG, Stream Ordered Memory
// Allocator: a pool gives freed memory out again, with whatever it holds, and so does the driver
// after cudaFreeHost. NaNs show in whatever is made of them.
TEST_F(CudaRules, NewMemoryIsNoNumber) {
  cudaStream_t const stream = new_stream();
  cudaMemPool_t const pool = make_pool();
  for (const bool pinned : {false, true}) {
    for (int round = 0; round < 3; ++round) {
      void* memory = nullptr;
      EXPECT_EQ(pinned ? cudaHostAlloc(&memory, sizeof(double), 0)
                       : cudaMallocFromPoolAsync(&memory, sizeof(double), pool, stream),
                cudaSuccess);
      EXPECT_TRUE(std::isnan(*static_cast<float*>(memory))) << pinned;
      EXPECT_TRUE(std::isnan(*static_cast<double*>(memory))) << pinned;
      std::memset(memory, 0, sizeof(double));
      EXPECT_EQ(pinned ? cudaFreeHost(memory) : cudaFreeAsync(memory, stream), cudaSuccess);
      cudaStreamSynchronize(stream);
    }
  }
}

// PG, Asynchronous Concurrent Execution, Streams: no order between streams but by events.
TEST_F(CudaRules, OnlyEventsOrderStreams) {
  int first_wins = 0;
  constexpr int kRounds = 64;
  stand_in::delay_work(3);
  cudaStream_t const first = new_stream();
  cudaStream_t const second = new_stream();
  cudaEvent_t const event = new_event();
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<int> turn = 0;
    int of_first = 0;
    stand_in::enqueue("cudaMemsetAsync", first, [&] { of_first = ++turn; });
    stand_in::enqueue("cudaMemsetAsync", second, [&] { ++turn; });
    cudaStreamSynchronize(first);
    cudaStreamSynchronize(second);
    first_wins += of_first == 1 ? 1 : 0;
    int after = 0;
    stand_in::enqueue("cudaMemsetAsync", first, [&] { after = 1; });
    cudaEventRecord(event, first);
    cudaStreamWaitEvent(second, event, 0);
    stand_in::enqueue("cudaMemsetAsync", second, [&] { after *= 2; });
    cudaStreamSynchronize(second);
    ASSERT_EQ(after, 2);
  }
  EXPECT_GT(first_wins, 0);
  EXPECT_LT(first_wins, kRounds);
}

}  // namespace
}  // namespace hsdp
