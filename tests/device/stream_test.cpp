#include "hsdp/device/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <csignal>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/device/buffer.h"
#include "hsdp/error.h"

namespace hsdp {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Kind {
  const char* name;
  Stream (*make)();
};

class Streams : public ::testing::TestWithParam<Kind> {
 protected:
  static Stream make() { return GetParam().make(); }
};

TEST_P(Streams, RunWorkInOrder) {
  Stream stream = make();
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) stream.run([&order, i] { order.push_back(i); });
  stream.synchronize();
  ASSERT_EQ(order.size(), 1000U);
  for (int i = 0; i < 1000; ++i) ASSERT_EQ(order[static_cast<std::size_t>(i)], i);
  EXPECT_EQ(stream.device(), Device{});
  EXPECT_EQ(stream.native_handle(), nullptr);
}

TEST_P(Streams, EventsCompleteAfterTheWorkBeforeThem) {
  Stream stream = make();
  EXPECT_TRUE(stream.record().complete());
  int value = 0;
  stream.run([&] { value = 1; });
  const Event event = stream.record();
  event.wait();
  EXPECT_TRUE(event.complete());
  EXPECT_EQ(value, 1);
}

TEST_P(Streams, BreakAtTheFirstError) {
  Stream stream = make();
  const Event before = stream.record();
  std::atomic<bool> ran = false;
  stream.run([] { throw std::runtime_error("first"); });
  stream.run([&] { ran = true; });
  stream.run([] { throw std::runtime_error("second"); });
  const Event after = stream.record();
  EXPECT_THAT([&] { after.wait(); }, ThrowsMessage<std::runtime_error>("first"));
  EXPECT_THAT([&] { stream.synchronize(); }, ThrowsMessage<std::runtime_error>("first"));
  EXPECT_TRUE(after.complete());
  EXPECT_FALSE(ran);
  EXPECT_NO_THROW(before.wait());
  // The stream stays broken, even for events recorded while it is idle.
  stream.run([&] { ran = true; });
  EXPECT_THAT([&] { stream.record().wait(); }, ThrowsMessage<std::runtime_error>("first"));
  EXPECT_FALSE(ran);
}

TEST_P(Streams, CarryErrorsThroughEventsToOtherStreams) {
  Stream broken = make();
  Stream follower = make();
  std::atomic<bool> ran = false;
  broken.run([] { throw UsageError("broken"); });
  follower.wait(broken.record());
  follower.run([&] { ran = true; });
  EXPECT_THAT([&] { follower.synchronize(); }, ThrowsMessage<UsageError>("broken"));
  EXPECT_FALSE(ran);
}

TEST_P(Streams, DropWhatADroppedTaskHolds) {
  Stream stream = make();
  auto held = std::make_shared<int>(1);
  stream.run([] { throw std::runtime_error("broken"); });
  stream.run([held] { static_cast<void>(held); });
  EXPECT_THROW(stream.synchronize(), std::runtime_error);
  EXPECT_EQ(held.use_count(), 1);
}

TEST_P(Streams, TakeWorkFromManyThreads) {
  Stream stream = make();
  int sum = 0;  // not atomic: the stream runs one task at a time
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([stream, &sum]() mutable {
      for (int i = 0; i < 500; ++i) stream.run([&sum] { ++sum; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  stream.synchronize();
  EXPECT_EQ(sum, 2000);
}

TEST_P(Streams, CopiesShareTheQueue) {
  const Stream stream = make();
  const Stream copy = stream;  // NOLINT(performance-unnecessary-copy-initialization)
  EXPECT_TRUE(copy.same_queue(stream));
  EXPECT_FALSE(make().same_queue(stream));
}

INSTANTIATE_TEST_SUITE_P(
    Host, Streams,
    ::testing::Values(Kind{"inline", [] { return Stream::inline_host(); }},
                      Kind{"worker", [] { return Stream::host_worker("a name that is too long"); }},
                      Kind{"created", [] { return Stream::create({}, "created"); }}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(WorkerStream, DoesNotBlockTheCaller) {
  std::promise<void> gate;
  Stream stream = Stream::host_worker("gated");
  stream.run([&gate] { gate.get_future().wait(); });
  const Event event = stream.record();
  EXPECT_FALSE(event.complete());
  gate.set_value();
  event.wait();
  EXPECT_TRUE(event.complete());
}

TEST(WorkerStream, WaitsForAnotherStreamsEventWithoutBlockingTheCaller) {
  std::promise<void> gate;
  std::vector<int> order;
  Stream first = Stream::host_worker("first");
  Stream second = Stream::host_worker("second");
  first.run([&] {
    gate.get_future().wait();
    order.push_back(1);
  });
  second.wait(first.record());
  second.run([&] { order.push_back(2); });
  gate.set_value();
  second.synchronize();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(WorkerStream, DrainsWhenItsLastCopyDies) {
  std::promise<void> gate;
  std::atomic<int> count = 0;
  std::thread opener;
  {
    Stream stream = Stream::host_worker("drained");
    stream.run([&] { gate.get_future().wait(); });
    for (int i = 0; i < 10; ++i) stream.run([&] { ++count; });
    opener = std::thread([&] { gate.set_value(); });
  }
  EXPECT_EQ(count, 10);
  opener.join();
}

TEST(WorkerStream, MayDieInItsOwnTask) {
  // The thread may outlive this function, so it owns what it uses.
  auto gate = std::make_shared<std::promise<void>>();
  auto done = std::make_shared<std::promise<int>>();
  std::future<int> result = done->get_future();
  auto stream = std::make_optional(Stream::host_worker("own task"));
  stream->run([copy = *stream, gate] { gate->get_future().wait(); });
  stream->run([done] { done->set_value(7); });
  stream.reset();  // now the first task holds the last copy
  gate->set_value();
  EXPECT_EQ(result.get(), 7);
}

TEST(WorkerStream, SaysSoWhenATaskWaitsForItsOwnStream) {
  Stream stream = Stream::host_worker("selfish");
  std::promise<void> gate;
  stream.run([&stream, &gate] {
    gate.get_future().wait();
    stream.synchronize();
  });
  gate.set_value();
  EXPECT_THAT([&] { stream.synchronize(); }, ThrowsMessage<UsageError>(HasSubstr("itself")));
}

TEST(WorkerStream, LeavesSignalsToTheApplication) {
  Stream stream = Stream::host_worker("signals");
  sigset_t blocked;
  sigemptyset(&blocked);
  char name[32] = {};
  stream.run([&] {
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    pthread_getname_np(pthread_self(), name, sizeof name);
  });
  stream.synchronize();
  EXPECT_EQ(sigismember(&blocked, SIGINT), 1);
  EXPECT_EQ(sigismember(&blocked, SIGTERM), 1);
  EXPECT_STREQ(name, "signals");
  sigset_t own;
  pthread_sigmask(SIG_SETMASK, nullptr, &own);
  EXPECT_EQ(sigismember(&own, SIGINT), 0);
}

// A build without CUDA names the option, a build with CUDA what the machine lacks.
TEST(Gpu, ThatIsNotThereNamesWhatIsMissing) {
  const Device absent{DeviceType::kCuda, 63};
  const auto names_what_is_missing = ThrowsMessage<UsageError>(::testing::AllOf(
      HasSubstr("cuda:63"),
      ::testing::AnyOf(HasSubstr("HSDP_CUDA=ON"), HasSubstr("CUDA_VISIBLE_DEVICES"))));
  EXPECT_THAT([&] { static_cast<void>(Stream::create(absent, "gpu")); }, names_what_is_missing);
  EXPECT_THAT([&] { static_cast<void>(Buffer(absent, 8)); }, names_what_is_missing);
}

TEST(Event, OfNothingIsComplete) {
  const Event event;
  EXPECT_TRUE(event.complete());
  EXPECT_NO_THROW(event.wait());
}

}  // namespace
}  // namespace hsdp
