// A failed call ends the world on every rank, in time, with an error that says why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdlib>
#include <latch>
#include <string>
#include <vector>

#include "hsdp/error.h"
#include "tests/comm/blames.h"
#include "tests/comm/elements.h"
#include "tests/comm/rank_threads.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

class Failure : public testing::TestWithParam<Path> {
 protected:
  static WorldShape shape(int size, milliseconds timeout = milliseconds(20'000)) {
    return {.size = size, .path = GetParam(), .timeout = timeout};
  }
};

TEST_P(Failure, CallsThatDifferAreNamedBeforeAnyDataMoves) {
  const struct {
    std::function<void(Communicator& world, TensorView data, bool odd)> call;
    std::vector<std::string> named;
  } rows[] = {
      {[](auto& world, auto data, bool odd) {
         data = data.slice(0, 99);
         std::vector<float> out(33);
         if (odd) world.reduce_scatter(data, {out.data(), 33});
         world.all_reduce({.data = data, .bucket = 3});
       },
       {"expected all_reduce of 99 f32 of bucket 3 (ranks 0, 2)",
        "got reduce_scatter of 99 f32 (rank 1)"}},
      {[](auto& world, auto data, bool odd) { world.all_reduce(data.slice(0, odd ? 99 : 100)); },
       {"of 100 f32 (ranks 0, 2)", "of 99 f32 (rank 1)"}},
      {[](auto& world, auto data, bool odd) {
         if (odd) data.dtype = Dtype::kBf16;
         world.all_reduce(data);
       },
       {"of 100 f32 (ranks 0, 2)", "of 100 bf16 (rank 1)"}},
      {[](auto& world, auto data, bool odd) {
         world.all_reduce({.data = data, .divisor = odd ? 2.0F : 3.0F});
       },
       {"with another cut, exponent or divisor"}},
      {[](auto& world, auto data, bool odd) { world.broadcast(data, odd ? 1 : 0); },
       {"from rank 0", "from rank 1"}},
      {[](auto& world, auto data, bool odd) {
         data.dtype = Dtype::kU8;
         std::vector<std::uint8_t> out(120);
         const RowCut cut({0, odd ? 30 : 40, 60, 100});  // the same on rank 2
         world.all_to_all(data, {out.data(), 3 * cut.length(world.rank()), Dtype::kU8},
                          Stream::inline_host(), cut, {5});
       },
       {"expected all_to_all of 100 u8 of bucket 5 (ranks 0, 2), got",
        "with another cut, exponent or divisor"}},
      {[](auto& world, auto /*data*/, bool odd) {
         if (odd) static_cast<void>(world.split(0, 0));
         static_cast<void>(world.allocate(10, Dtype::kF32));
       },
       {"expected allocate of f32", "got split (rank 1)"}},
  };
  for (const auto& row : rows) {
    for (const bool has_links : {false, true}) {
      SCOPED_TRACE(row.named[0]);
      std::vector<std::string> messages(3);
      run_world(shape(3), [&](Communicator& world) {
        const Memory data(world, GetParam(), 100, Dtype::kF32);
        if (has_links) world.all_reduce(data.view());
        const auto value = [&](std::int64_t /*i*/) { return world.rank() + 1.0; };
        fill(data.view(), value);
        const auto error =
            caught<MismatchError>([&] { row.call(world, data.view(), world.rank() == 1); });
        ASSERT_TRUE(error);
        EXPECT_THAT(error->ranks(), ElementsAre(1));
        EXPECT_THAT([&] { world.barrier(); }, ThrowsMessage<MismatchError>(error->what()));
        expect_elements(data.view(), value);
        messages[static_cast<std::size_t>(world.rank())] = error->what();
      });
      EXPECT_THAT(messages, Each(messages[0]));
      for (const std::string& text : row.named) EXPECT_THAT(messages[0], HasSubstr(text));
    }
  }
}

// All ranks have made some calls twice. Says which of them rank 1 makes next: 11 is call 1 with one
// element more, -1 is call 1 unplanned.
TEST_P(Failure, PlannedCallsThatDifferAreNamed) {
  const struct {
    std::vector<int> of_rank_1;
    std::string expected;
    std::string got;
    int count = 200;
  } rows[] = {
      {{0, 11, 2, 3}, "all_reduce of 201 f32 of bucket 1", "all_reduce of 202 f32 of bucket 1"},
      {{0, 2, 1, 3}, "all_reduce of 201 f32 of bucket 1", "all_reduce of 202 f32 of bucket 2"},
      {{0, 2, 3}, "all_reduce of 201 f32 of bucket 1", "all_reduce of 202 f32 of bucket 2"},
      {{0, -1, 2, 3}, "all_reduce of 201 f32 of bucket 1", "all_reduce of 201 f32 of bucket 1"},
      // Messages that are shorter than the description of a call.
      {{0, -1, 2, 3}, "all_reduce of 9 f32 of bucket 1", "all_reduce of 9 f32 of bucket 1", 8},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.got);
    const auto start = std::chrono::steady_clock::now();
    run_world(shape(3, milliseconds(60'000)), [&](Communicator& world) {
      const Memory data(world, GetParam(), 300, Dtype::kF32);
      const auto make = [&](const std::vector<int>& calls) {
        for (const int number : calls) {
          fill(data.view(), [](std::int64_t i) { return 1.0 + static_cast<double>(i); });
          const int call = std::abs(number) % 10;
          world.all_reduce({.data = data.view().slice(0, row.count + call + (number > 9 ? 1 : 0)),
                            .bucket = call,
                            .planned = number >= 0});
        }
      };
      const std::vector<int> all{0, 1, 2, 3};
      make(all);
      make(all);
      const auto error = caught<MismatchError>([&] {
        make(world.rank() == 1 ? row.of_rank_1 : all);
        world.compare_calls("at the end");
        world.barrier();
      });
      ASSERT_TRUE(error);
      EXPECT_THAT(error->what(),
                  AllOf(HasSubstr(row.expected), HasSubstr(row.got), HasSubstr("(rank 1)")));
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(30'000)) << "by a timeout";
  }
}

TEST_P(Failure, ARankThatDoesNotComeIsNamedByAll) {
  const auto start = std::chrono::steady_clock::now();
  std::latch done(3);
  run_world(shape(4, milliseconds(300)), [&](Communicator& world) {
    const Memory data(world, GetParam(), 1'000, Dtype::kF32);
    if (world.rank() == 1) return done.wait();
    EXPECT_THAT([&] { world.all_reduce({.data = data.view(), .bucket = 7}); },
                blames<TimeoutError>({1}, {"all_reduce of bucket 7", "rank 1"}));
    done.count_down();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(15'000));
}

TEST_P(Failure, TheEndOfTheChainOfWaitsIsAtFault) {
  std::latch done(3);
  run_world(shape(4, milliseconds(400)), [&](Communicator& world) {
    // Rank r waits for r + 1 in a group of those two; rank 3 does nothing.
    std::vector<Communicator> pairs;
    for (int low = 0; low < 3; ++low) {
      const bool member = world.rank() == low || world.rank() == low + 1;
      pairs.push_back(world.split(member ? 0 : -1, world.rank()));
    }
    if (world.rank() == 3) return done.wait();
    EXPECT_THAT([&] { pairs[static_cast<std::size_t>(world.rank())].barrier(); },
                blames<TimeoutError>({3}, {"rank 3 of 4 did not arrive within"}));
    done.count_down();
  });
}

TEST_P(Failure, AbortReachesRanksThatWait) {
  run_world(shape(3), [](Communicator& world) {
    if (world.rank() == 0) return world.abort("the disk is full");
    const auto error = caught<RankError>([&] { world.barrier(); });
    ASSERT_TRUE(error);
    EXPECT_THAT(error->what(), HasSubstr("the disk is full"));
    EXPECT_THAT(error->ranks(), ElementsAre(0));
    EXPECT_THAT([&] { static_cast<void>(world.split(0, 0)); },
                ThrowsMessage<RankError>(error->what()));
  });
}

TEST_P(Failure, AsynchronousCallsFailOnTheStream) {
  run_world(shape(2), [](Communicator& world) {
    Stream stream = Stream::host_worker("comm");
    const Memory data(world, GetParam(), 10, Dtype::kF32);
    world.all_reduce(data.view().slice(0, 10 - world.rank()), stream);
    EXPECT_THAT([&] { stream.synchronize(); },
                ThrowsMessage<MismatchError>(HasSubstr("do not match")));
  });
}

milliseconds thread_cpu_time() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  const auto in_ms = [](const timeval& time) { return time.tv_sec * 1000 + time.tv_usec / 1000; };
  return milliseconds(in_ms(usage.ru_utime) + in_ms(usage.ru_stime));
}

TEST(Waiting, CostsLittle) {
  for (const Path path : {Path::kPrivate, Path::kTcp}) {
    run_world({.size = 2, .path = path}, [path](Communicator& world) {
      const Memory data(world, path, 1'000, Dtype::kF32);
      world.all_reduce(data.view());
      if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(1'000));
      const milliseconds before = thread_cpu_time();
      world.all_reduce(data.view());
      EXPECT_LT(thread_cpu_time() - before, milliseconds(50)) << "of 1000 ms, " << name(path);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Host, Failure,
                         testing::Values(Path::kDirect, Path::kPrivate, Path::kTcp, Path::kMixed),
                         [](const auto& chosen) { return name(chosen.param); });

}  // namespace
}  // namespace hsdp::test
