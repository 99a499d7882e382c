// What the stand-in for the CUDA runtime refuses and punishes, each with where the real one is said
// to do so: the Programming Guide (PG, CUDA 13.0) and the comments of cuda_runtime_api.h (API).
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
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

class CudaRules : public ::testing::Test {
 protected:
  ~CudaRules() override {
    stand_in::break_devices(0);
    stand_in::fail_allocation(std::nullopt);
    stand_in::delay_work({});
    cudaSetDevice(0);
    static_cast<void>(cudaGetLastError());
  }
};

// PG, Multi-Device System, Stream and Event Behavior.
TEST_F(CudaRules, AKernelGoesToAStreamOfTheCurrentDevice) {
  cudaStream_t const stream = make_stream();
  EXPECT_EQ(launch(stream), cudaSuccess);
  cudaSetDevice(1);
  EXPECT_EQ(launch(stream), cudaErrorInvalidResourceHandle);
  std::array<int, 2> copied{7, 0};
  EXPECT_EQ(cudaMemcpyAsync(&copied[1], copied.data(), sizeof(int), cudaMemcpyDefault, stream),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(copied[1], 7);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// The same section.
TEST_F(CudaRules, AnEventIsRecordedOnItsOwnDeviceAndWaitedForOnAny) {
  cudaStream_t const stream = make_stream();
  cudaEvent_t const event = make_event();
  cudaSetDevice(1);
  cudaStream_t const other = make_stream();
  EXPECT_EQ(cudaEventRecord(event, other), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
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

// The same section: it is the thread's device that counts, and a thread begins with device 0.
TEST_F(CudaRules, AnotherThreadHasADeviceOfItsOwn) {
  cudaSetDevice(1);
  cudaEvent_t const event = make_event();
  stand_in::forget_contexts();
  std::thread([event] { EXPECT_EQ(cudaEventQuery(event), cudaSuccess); }).join();
  EXPECT_EQ(stand_in::contexts(), std::set<int>{0});
  cudaEventDestroy(event);
}

using CudaRulesDeathTest = CudaRules;

// API, cudaStreamDestroy and cudaEventDestroy: "the handle must not be accessed after this call".
TEST_F(CudaRulesDeathTest, WhatWasDestroyedIsNotUsed) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
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

// API, cudaStreamBeginCapture: what is pushed into the stream is not executed.
TEST_F(CudaRules, ACapturedStreamExecutesNothing) {
  cudaStream_t const stream = make_stream();
  cudaGraph_t graph = nullptr;
  bool ran = false;
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  stand_in::enqueue("cudaMemsetAsync", stream, [&ran] { ran = true; });
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_FALSE(ran);
  cudaStreamDestroy(stream);
}

// PG, Stream Capture, Prohibited and Unhandled Operations: asking for, or waiting for, a stream or
// an event that is captured invalidates the capture, in every mode.
TEST_F(CudaRules, AskingForWhatIsCapturedInvalidatesTheCapture) {
  cudaStream_t const stream = make_stream();
  cudaEvent_t const event = make_event();
  const std::vector<cudaError_t (*)(cudaStream_t, cudaEvent_t)> calls{
      [](cudaStream_t asked, cudaEvent_t) { return cudaStreamSynchronize(asked); },
      [](cudaStream_t, cudaEvent_t asked) { return cudaEventQuery(asked); },
      [](cudaStream_t, cudaEvent_t asked) { return cudaEventSynchronize(asked); }};
  for (const auto call : calls) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
    EXPECT_NE(call(stream, event), cudaSuccess);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusInvalidated);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
  }
  cudaEventDestroy(event);
  cudaStreamDestroy(stream);
}

// API, cudaThreadExchangeStreamCaptureMode: potentially unsafe calls of other threads, unless
// theirs is relaxed.
TEST_F(CudaRules, AGlobalCaptureForbidsOtherThreadsToAsk) {
  cudaStream_t const stream = make_stream();
  cudaEvent_t const event = make_event();
  for (const bool is_relaxed : {true, false}) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    std::thread([&] {
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      if (is_relaxed) cudaThreadExchangeStreamCaptureMode(&mode);
      EXPECT_EQ(cudaEventQuery(event),
                is_relaxed ? cudaSuccess : cudaErrorStreamCaptureUnsupported);
    }).join();
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph),
              is_relaxed ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
  }
  cudaEventDestroy(event);
  cudaStreamDestroy(stream);
}

// PG, Stream Capture, Cross-stream Dependencies and Events.
TEST_F(CudaRules, AStreamThatWaitsForACapturedEventIsCapturedToo) {
  cudaStream_t const stream = make_stream();
  cudaStream_t const other = make_stream();
  cudaEvent_t const event = make_event();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  EXPECT_EQ(cudaStreamIsCapturing(other, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  EXPECT_EQ(cudaStreamWaitEvent(nullptr, event, 0), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaEventDestroy(event);
  cudaStreamDestroy(stream);
  cudaStreamDestroy(other);
}

// API, cudaMallocFromPoolAsync and cudaHostAlloc: cudaErrorMemoryAllocation, and nothing else
// changes.
TEST_F(CudaRules, AnyAllocationMayFail) {
  cudaStream_t const stream = make_stream();
  void* memory = nullptr;
  stand_in::fail_allocation({{.after = 1, .times = 1}});
  EXPECT_EQ(cudaHostAlloc(&memory, 8, 0), cudaSuccess);
  cudaFreeHost(memory);
  EXPECT_EQ(cudaMallocFromPoolAsync(&memory, 8, make_pool(), stream), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  cudaFreeAsync(allocate(8, stream), stream);
  cudaStreamDestroy(stream);
}

// PG, Stream Ordered Memory Allocator: what a pool keeps it gives out again, on another stream
// behind the free of the first (cudaMemPoolReuseAllowInternalDependencies); only to grow it may
// fail.
TEST_F(CudaRules, APoolFailsOnlyWhereItGrows) {
  cudaStream_t const stream = make_stream();
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
  cudaStreamDestroy(stream);
}

// API, cudaMallocAsync: the memory is not initialized. NaNs show in whatever is made of them.
TEST_F(CudaRules, NewMemoryIsNoNumber) {
  cudaStream_t const stream = make_stream();
  auto* const words = static_cast<std::uint32_t*>(allocate(8, stream));
  EXPECT_TRUE(std::isnan(*reinterpret_cast<float*>(words)));
  EXPECT_TRUE(std::isnan(*reinterpret_cast<double*>(words)));
  cudaFreeAsync(words, stream);
  cudaStreamDestroy(stream);
}

// PG, Asynchronous Concurrent Execution, Streams: no order between streams but by events.
TEST_F(CudaRules, OnlyEventsOrderStreams) {
  int first_wins = 0;
  constexpr int kRounds = 64;
  stand_in::delay_work(3);
  cudaStream_t const first = make_stream();
  cudaStream_t const second = make_stream();
  cudaEvent_t const event = make_event();
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
  cudaEventDestroy(event);
  cudaStreamDestroy(first);
  cudaStreamDestroy(second);
}

}  // namespace
}  // namespace hsdp
