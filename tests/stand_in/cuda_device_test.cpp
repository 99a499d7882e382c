// What the CUDA device does when the runtime refuses, and when the GPU makes no progress.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "capture.h"
#include "cuda_runtime.h"
#include "cuda_stand_in.h"
#include "hsdp/device/buffer.h"
#include "hsdp/device/copy.h"
#include "hsdp/device/flag.h"
#include "hsdp/device/in_flight.h"
#include "hsdp/device/memory_source.h"
#include "hsdp/device/scratch.h"
#include "hsdp/error.h"
#include "hsdp/kernels/norm.h"

namespace hsdp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr Device kGpu{DeviceType::kCuda, 0};
constexpr Device kOtherGpu{DeviceType::kCuda, 1};

class CudaDevice : public ::testing::Test {
 protected:
  CudaDevice() { cudaSetDevice(0); }  // gives it a context
  ~CudaDevice() override { stand_in::set_devices(2); }
};

TEST_F(CudaDevice, ThatIsNotThereIsNamed) {
  const auto ask = [] { static_cast<void>(Stream::create({DeviceType::kCuda, 2}, "none")); };
  EXPECT_THAT(ask, ThrowsMessage<UsageError>(AllOf(HasSubstr("cuda:2"), HasSubstr("2 devices"),
                                                   HasSubstr("CUDA_VISIBLE_DEVICES"))));
  stand_in::set_devices(0, cudaErrorInsufficientDriver);
  EXPECT_THAT(ask, ThrowsMessage<UsageError>(HasSubstr("expected a CUDA driver")));
  stand_in::set_devices(0, cudaErrorNoDevice);
  EXPECT_THAT(ask, ThrowsMessage<UsageError>(HasSubstr("expected a GPU")));
  EXPECT_THROW(Buffer(kGpu, 8), UsageError);
  EXPECT_THROW(static_cast<void>(make_flag(kGpu)), UsageError);
  EXPECT_THROW(static_cast<void>(Stream::borrow(kGpu, nullptr)), UsageError);
  stand_in::set_devices(0, 0);
  EXPECT_THAT(ask, ThrowsMessage<UsageError>(HasSubstr("expected a GPU")));
}

TEST_F(CudaDevice, StaysTheCallersCurrentOne) {
  ASSERT_EQ(stand_in::current_device(), 0);
  Stream stream = Stream::create(kOtherGpu, "other");
  int inside = -1;
  stream.run([&inside] { inside = stand_in::current_device(); });
  const Buffer buffer(kOtherGpu, 100);
  static_cast<void>(stream.record());
  EXPECT_EQ(inside, 1);
  EXPECT_EQ(stand_in::current_device(), 0);
}

TEST_F(CudaDevice, BecomesThatOfAThreadThatUsedNone) {
  stand_in::forget_contexts();
  std::thread([] {
    const Buffer buffer(kOtherGpu, 100);
    EXPECT_EQ(stand_in::current_device(), 1) << "to go back would make a context";
  }).join();
  EXPECT_EQ(stand_in::contexts(), std::set<int>{1});
}

// A context takes half a gigabyte; otherwise every rank of a machine would have one on GPU 0.
TEST_F(CudaDevice, HasNoContextOnAnother) {
  ASSERT_EQ(stand_in::current_device(), 0);
  stand_in::forget_contexts();
  const auto in_thread = [](const auto& act) { std::thread(act).join(); };  // its device is 0
  in_thread([&] {
    auto stream = std::make_optional(Stream::create(kOtherGpu, "other"));
    auto buffer = std::make_optional<Buffer>(kOtherGpu, 100);
    auto pinned = std::make_optional<Buffer>(kOtherGpu, 100, Buffer::Place::kPinnedHost);
    auto scratch = std::make_optional<Scratch>(100, *stream);
    auto flag = std::make_optional(make_flag(kOtherGpu));
    copy_bytes(buffer->data(), pinned->data(), 100, *stream);
    auto event = std::make_optional(stream->record());
    in_thread([&] { stream->wait(*event); });
    in_thread([&] { static_cast<void>(event->complete()); });
    in_thread([&] { event->wait(); });
    in_thread([&] { event.reset(); });
    in_thread([&] { scratch.reset(); });
    in_thread([&] { buffer.reset(); });
    in_thread([&] { pinned.reset(); });
    in_thread([&] { flag.reset(); });
    in_thread([&] { stream->synchronize(); });
    in_thread([&] { stream.reset(); });
  });
  EXPECT_EQ(stand_in::contexts(), std::set<int>{1});
}

TEST_F(CudaDevice, LeavesACaptureWhole) {
  Stream stream = Stream::create(kGpu, "stream");
  const Event before = stream.record();
  const Stream captured = Stream::create(kGpu, "captured");
  const stand_in::Capture capture(captured.native_handle());
  for (const bool in_thread : {false, true}) {
    const auto act = [&] {
      while (!before.complete()) std::this_thread::yield();
      before.wait();
      stream.record().wait();
      stream.synchronize();
      const Buffer buffer(kGpu, 100);
      const Buffer pinned(kGpu, 100, Buffer::Place::kPinnedHost);
      const Scratch scratch(100, stream);
    };
    in_thread ? std::thread(act).join() : act();
  }
}

TEST_F(CudaDevice, RefusesAStreamThatIsCaptured) {
  Stream own = Stream::create(kGpu, "own");
  const Buffer buffer(kGpu, 100);
  const Stream captured = Stream::create(kGpu, "captured");
  Stream caller = Stream::borrow(kGpu, captured.native_handle());
  const std::vector<std::function<void()>> calls{
      [&] { static_cast<void>(caller.record()); },
      [&] { caller.wait(own.record()); },
      [&] { caller.run([] {}); },
      [&] { caller.synchronize(); },
      [&] { const Scratch scratch(100, caller); },
      [&] { copy_bytes(buffer.data(), buffer.data() + 50, 50, caller); }};
  {
    const stand_in::Capture capture(captured.native_handle());
    for (const auto& call : calls) {
      EXPECT_THAT(call,
                  ThrowsMessage<UsageError>(AllOf(HasSubstr("cuda:0"), HasSubstr("CUDA graph"),
                                                  HasSubstr("outside of the capture"))));
    }
  }
  for (const auto& call : calls) call();  // it is an ordinary stream again
  caller.synchronize();                   // before the memory is freed
}

TEST_F(CudaDevice, TakesNoErrorForDone) {
  Stream stream = Stream::create(kGpu, "stream");
  const stand_in::Standstill nothing_moves;
  const Event event = stream.record();
  stand_in::fail_call({{.name = "cudaEventQuery", .error = cudaErrorLaunchFailure}});
  EXPECT_THAT([&] { static_cast<void>(event.complete()); },
              ThrowsMessage<Error>(HasSubstr("cuda:0: cannot ask for an event")));
  EXPECT_FALSE(event.complete());
}

TEST_F(CudaDevice, ThatIsBrokenStillHasEvents) {
  Stream stream = Stream::create(kOtherGpu, "stream");  // not the thread's current one
  stream.run([] { throw std::runtime_error("of a task"); });
  stand_in::break_devices(cudaErrorLaunchFailure);
  const Event event = stream.record();
  EXPECT_THAT([&] { event.throw_if_failed(); }, ThrowsMessage<std::runtime_error>("of a task"));
  EXPECT_THROW(event.wait(), Error);
  stand_in::break_devices(0);
}

TEST_F(CudaDevice, NeverHoldsTheCallerUp) {
  Stream stream = Stream::create(kGpu, "first");
  Stream other = Stream::create(kGpu, "second");
  Stream host = Stream::host_worker("host");
  const Buffer sum(kGpu, sizeof(double));
  const Buffer values(kGpu, 400'000);
  std::atomic<bool> ran = false;
  Event last;
  {
    const stand_in::Standstill nothing_moves;
    for (int i = 0; i < 3; ++i) {
      const kernels::SquaredNorm norm{values.view(Dtype::kF32),
                                      reinterpret_cast<double*>(sum.data())};
      kernels::squared_norms({&norm, 1}, stream);
      const Scratch scratch(100, stream);
      other.wait(stream.record());
      host.wait(other.record());
      host.run([&ran] { ran = true; });
      stream.wait(host.record());
    }
    last = stream.record();
    EXPECT_FALSE(last.complete());
    EXPECT_FALSE(ran);
  }
  last.wait();
  EXPECT_TRUE(last.complete());
  EXPECT_TRUE(ran);
}

TEST_F(CudaDevice, HoldsMemoryUntilItsEvent) {
  Stream stream = Stream::create(kGpu, "stream");
  InFlight in_flight;
  auto memory = std::make_shared<int>(0);
  const std::weak_ptr<int> alive = memory;
  {
    const stand_in::Standstill nothing_moves;
    in_flight.hold(stream.record(), std::move(memory));
    in_flight.reap();
    EXPECT_EQ(in_flight.size(), 1U);
    EXPECT_FALSE(alive.expired());
  }
  stream.synchronize();
  in_flight.reap();
  EXPECT_EQ(in_flight.size(), 0U);
  EXPECT_TRUE(alive.expired());
}

TEST_F(CudaDevice, GivesItsMemoryBack) {
  const Buffer first(kGpu, 1);  // after what earlier tests freed
  const std::int64_t before = stand_in::allocated_bytes();
  {
    const Buffer buffer(kGpu, 1000);
    Stream stream = Stream::create(kGpu, "stream");
    {
      const Scratch scratch(3000, stream);
      EXPECT_EQ(stand_in::allocated_bytes(), before + 4000);
    }
    stream.synchronize();
    EXPECT_EQ(stand_in::allocated_bytes(), before + 1000);
  }
  // Freed on a stream of the pool: another allocation comes after it.
  const Buffer next(kGpu, 1);
  EXPECT_EQ(stand_in::allocated_bytes(), before + 1);
}

TEST_F(CudaDevice, ScratchThatWasReservedIsThere) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  const ScratchReserve one(kGpu, kMiB);
  auto two = std::make_optional<ScratchReserve>(kGpu, 3 * kMiB);
  const std::int64_t before = stand_in::allocation_count();
  const Stream stream = Stream::create(kGpu, "scratch");
  {
    const Scratch first(kMiB, stream);
    const Scratch second(3 * kMiB, stream);
  }
  EXPECT_EQ(stand_in::allocation_count(), before);
  stand_in::fail_allocation(stand_in::FailingAllocation{});
  EXPECT_THROW(ScratchReserve(kGpu, 20 * kMiB), Error);
  two.reset();
  const ScratchReserve again(kGpu, 3 * kMiB);           // the pool still has it
  EXPECT_EQ(stand_in::allocation_count(), before + 2);  // and one more
}

// torch records an event on it when it frees memory for which record_stream named it.
TEST_F(CudaDevice, AStreamIsThereWhenItsOwnerIsGone) {
  auto stream = std::make_optional(Stream::create(kGpu, "packs"));
  auto* const handle = static_cast<cudaStream_t>(stream->native_handle());
  std::set<void*> others;
  {
    const stand_in::Standstill nothing_moves;
    stream->run([] {});
    cudaMemsetAsync(nullptr, 0, 0, handle);
    stream.reset();
    others.insert(Stream::create(kGpu, "next").native_handle());
    EXPECT_FALSE(others.contains(handle));  // its work is not done
  }
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, handle), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  cudaEventDestroy(event);
  std::vector<Stream> taken;
  while (!others.contains(handle) && taken.size() < 100) {
    others.insert(taken.emplace_back(Stream::create(kGpu, "again")).native_handle());
  }
  EXPECT_TRUE(others.contains(handle));
}

// What the library does during a backward pass is short, and the network waits for it.
TEST_F(CudaDevice, StreamsHaveTheHighestPriority) {
  int lowest = 0;
  int highest = 0;
  EXPECT_EQ(cudaDeviceGetStreamPriorityRange(&lowest, &highest), cudaSuccess);
  EXPECT_LT(highest, lowest);
  int priority = 0;
  const Stream stream = Stream::create(kGpu, "hop");
  auto* const handle = static_cast<cudaStream_t>(stream.native_handle());
  EXPECT_EQ(cudaStreamGetPriority(handle, &priority), cudaSuccess);
  EXPECT_EQ(priority, highest);
}

// Memory from a framework with its own pool.
TEST_F(CudaDevice, MemoryComesFromTheSourceThatIsSet) {
  std::vector<std::byte> memory(4096);
  int given_back = 0;
  const auto allocate = [&memory](Device device, std::size_t size, void* stream) {
    EXPECT_EQ(device, kGpu);
    EXPECT_NE(stream, nullptr);
    if (size > memory.size()) return std::shared_ptr<std::byte>();
    return std::shared_ptr<std::byte>(memory.data(), [](std::byte*) {});
  };
  set_memory_source({.allocate = allocate, .give_back_unused = [&](Device) { ++given_back; }});
  {
    const Buffer small(kGpu, 4096);
    EXPECT_EQ(small.data(), memory.data());
    EXPECT_TRUE(std::ranges::all_of(memory, [](std::byte b) { return b == std::byte{}; }));
    stand_in::fail_allocation({{.times = 1}});
    const Buffer large(kGpu, std::size_t{64} << 20);
    EXPECT_EQ(given_back, 1);
    stand_in::fail_allocation(stand_in::FailingAllocation{});
    EXPECT_THROW(Buffer(kGpu, std::size_t{65} << 20), Error);
    EXPECT_EQ(given_back, 2);
  }
  set_memory_source({});
}

TEST_F(CudaDevice, ScratchMayOutliveTheStreamItWasMadeFor) {
  const std::int64_t before = stand_in::allocated_bytes();
  auto stream = std::make_optional(Stream::create(kGpu, "stream"));
  auto scratch = std::make_optional<Scratch>(3000, *stream);
  stream.reset();
  scratch.reset();
  while (stand_in::allocated_bytes() > before) std::this_thread::yield();
}

TEST_F(CudaDevice, FlagsAreZeroWhenTheyComeBack) {
  for (int round = 0; round < 200; ++round) {
    const Flag flag = make_flag(kGpu);
    ASSERT_EQ(flag->load(), 0U);
    flag->store(1);
  }
}

// A device's first memory needs pools and a stream, which may not be available.
TEST_F(CudaDevice, PoolsThatCannotBeMadeAreAnErrorAndTriedAgain) {
  const Device unused{DeviceType::kCuda, 7};
  stand_in::set_devices(8);
  for (const auto& [call, after] : {std::pair{"cudaMemPoolCreate", 0},
                                    {"cudaMemPoolCreate", 1},
                                    {"cudaStreamCreateWithPriority", 0}}) {
    stand_in::fail_call({{.name = call,
                          .error = cudaErrorMemoryAllocation,
                          .after = after,
                          .device = unused.index}});
    EXPECT_THAT([&] { Buffer(unused, 64); },
                ThrowsMessage<Error>(
                    AllOf(HasSubstr("device: cuda:7: cannot make a"), HasSubstr("out of memory"))))
        << call << " " << after;
  }
  const Buffer buffer(unused, 64);
  EXPECT_EQ(*reinterpret_cast<const float*>(buffer.data()), 0.0F);
}

struct Refusal {
  const char* call;
  const char* message;
  void (*act)();
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.call; }

class CudaRefusals : public ::testing::TestWithParam<Refusal> {};

TEST_P(CudaRefusals, AreErrorsThatSayWhat) {
  const auto [call, message, act] = GetParam();
  act();
  stand_in::fail_call(
      {{.name = call, .error = cudaErrorLaunchFailure, .times = stand_in::kAlways}});
  EXPECT_THAT(
      act, ThrowsMessage<Error>(AllOf(HasSubstr("device: cuda:0: cannot "), HasSubstr(message))));
  stand_in::fail_call(std::nullopt);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "left for somebody else to find";
  act();
}

// Streams that others returned are used first, so each round takes more than ever before.
void use_up_streams() {
  static std::size_t count = 100;
  count += 100;
  std::vector<Stream> streams;
  while (streams.size() < count) streams.push_back(Stream::create(kGpu, "stream"));
}

void launch_kernel() {
  Stream stream = Stream::create(kGpu, "stream");
  const Buffer values(kGpu, 64);
  const Flag flag = make_flag(kGpu);
  kernels::find_nonfinite(values.view(Dtype::kF32), flag.get(), stream);
  stream.synchronize();
}

INSTANTIATE_TEST_SUITE_P(
    Calls, CudaRefusals,
    ::testing::Values(Refusal{"cudaMallocFromPoolAsync", "allocate 77 bytes",
                              [] { Buffer(kGpu, 77); }},
                      Refusal{"cudaMemsetAsync", "clear memory", [] { Buffer(kGpu, 77); }},
                      Refusal{"cudaStreamCreateWithPriority", "make a stream", use_up_streams},
                      Refusal{"cudaEventRecord", "record an event",
                              [] { Stream::create(kGpu, "stream").record().wait(); }},
                      Refusal{"cudaStreamWaitEvent", "wait for an event",
                              [] {
                                Stream first = Stream::create(kGpu, "first");
                                Stream second = Stream::create(kGpu, "second");
                                first.run([] {});
                                second.wait(first.record());
                                second.synchronize();
                              }},
                      Refusal{"cudaMemcpyAsync", "copy 4 bytes",
                              [] {
                                Stream stream = Stream::create(kGpu, "stream");
                                const Buffer buffer(kGpu, 8);
                                copy_bytes(buffer.data(), buffer.data() + 4, 4, stream);
                                stream.synchronize();
                              }},
                      Refusal{"cudaLaunchKernel", "start a kernel", launch_kernel},
                      Refusal{"cudaStreamSynchronize", "finish the work",
                              [] { Stream::create(kGpu, "stream").synchronize(); }}),
    [](const auto& test) { return std::string(test.param.call); });

TEST(CudaStreams, RaiseTheErrorOfAHostTheyWaitFor) {
  Stream host = Stream::host_worker("host");
  Stream stream = Stream::create(kGpu, "stream");
  Event failed;
  {
    const stand_in::Standstill nothing_moves;  // the event is not complete when it is waited for
    host.wait(stream.record());
    host.run([] { throw std::runtime_error("of the host"); });
    failed = host.record();
    stream.wait(failed);
  }
  EXPECT_THAT([&] { stream.synchronize(); }, ThrowsMessage<std::runtime_error>("of the host"));
  bool ran = false;
  stream.run([&ran] { ran = true; });
  EXPECT_FALSE(ran);
  EXPECT_THAT([&] { stream.record().wait(); }, ThrowsMessage<std::runtime_error>("of the host"));
}

TEST(CudaStreams, TakeWorkFromSeveralThreads) {
  Stream stream = Stream::create(kGpu, "stream");
  std::atomic<int> calls = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, stream]() mutable {
      for (int i = 0; i < 100; ++i) stream.run([&calls] { ++calls; });
      stream.record().wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(calls, 400);
}

}  // namespace
}  // namespace hsdp
