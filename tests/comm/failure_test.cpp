// A call that goes wrong ends the world on every rank, with an error that says why, and in time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <latch>

#include "hsdp/error.h"
#include "tests/comm/elements.h"
#include "tests/comm/rank_threads.h"

namespace hsdp::test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class Failure : public testing::TestWithParam<Path> {
 protected:
  static WorldShape shape(int size, milliseconds timeout = milliseconds(20'000)) {
    return {.size = size, .path = GetParam(), .timeout = timeout};
  }
};

// The message of the E that `call` throws, with the ranks it names.
template <typename E>
std::string message_of(const std::function<void()>& call, std::vector<int>* ranks = nullptr) {
  try {
    call();
  } catch (const E& error) {
    if constexpr (std::is_base_of_v<RankError, E>) {
      if (ranks != nullptr) *ranks = error.ranks();
    }
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

TEST_P(Failure, DifferentOperationsAreNamedOnEveryRank) {
  run_world(shape(4), [](Communicator& world) {
    const Memory data(world, GetParam(), 100, Dtype::kF32);
    const Memory out(world, GetParam(), 25, Dtype::kF32);
    std::vector<int> ranks;
    const std::string message = message_of<MismatchError>(
        [&] {
          if (world.rank() == 2) world.reduce_scatter(data.view(), out.view());
          world.all_reduce({.data = data.view(), .bucket = 3});
        },
        &ranks);
    EXPECT_THAT(message, AllOf(HasSubstr("expected all_reduce of 100 f32 of bucket 3"),
                               HasSubstr("(ranks 0, 1, 3)"),
                               HasSubstr("got reduce_scatter of 100 f32 (rank 2)")));
    EXPECT_THAT(ranks, ElementsAre(2));
    EXPECT_EQ(message_of<MismatchError>([&] { world.barrier(); }), message);
  });
}

TEST_P(Failure, DifferentCountsDtypesAndTermsAreNamed) {
  const auto mismatch = [](const std::function<void(Communicator&)>& call) {
    std::vector<std::string> messages(3);
    run_world(shape(3), [&](Communicator& world) {
      messages[static_cast<std::size_t>(world.rank())] =
          message_of<MismatchError>([&] { call(world); });
    });
    EXPECT_EQ(messages[0], messages[1]);
    EXPECT_EQ(messages[0], messages[2]);
    return messages[0];
  };
  const auto odd = [](const Communicator& world) { return world.rank() == 1; };
  EXPECT_THAT(mismatch([&](Communicator& world) {
                const Memory data(world, GetParam(), 100, Dtype::kF32);
                world.all_reduce(data.view().slice(0, odd(world) ? 99 : 100));
              }),
              AllOf(HasSubstr("of 100 f32 (ranks 0, 2)"), HasSubstr("of 99 f32 (rank 1)")));
  EXPECT_THAT(mismatch([&](Communicator& world) {
                const Memory data(world, GetParam(), 100, Dtype::kF32);
                TensorView view = data.view();
                if (odd(world)) view.dtype = Dtype::kBf16;
                world.all_reduce(view);
              }),
              AllOf(HasSubstr("of 100 f32 (ranks 0, 2)"), HasSubstr("of 100 bf16 (rank 1)")));
  EXPECT_THAT(mismatch([&](Communicator& world) {
                const Memory data(world, GetParam(), 100, Dtype::kF32);
                world.all_reduce({.data = data.view(), .divisor = odd(world) ? 2.0F : 3.0F});
              }),
              HasSubstr("with another cut, exponent or divisor"));
  EXPECT_THAT(mismatch([&](Communicator& world) {
                const Memory data(world, GetParam(), 100, Dtype::kF32);
                world.broadcast(data.view(), odd(world) ? 1 : 0);
              }),
              AllOf(HasSubstr("from rank 0"), HasSubstr("from rank 1")));
  EXPECT_THAT(mismatch([&](Communicator& world) {
                const Memory in(world, GetParam(), 100, Dtype::kU8);
                const Memory out(world, GetParam(), 120, Dtype::kU8);
                const RowCut cut({0, odd(world) ? 30 : 40, 60, 100});  // rank 2's row is the same
                world.all_to_all(in.view(), out.view().slice(0, 3 * cut.length(world.rank())),
                                 Stream::inline_host(), cut, 5);
              }),
              AllOf(HasSubstr("expected all_to_all of 100 u8 of bucket 5 (ranks 0, 2), got"),
                    HasSubstr("with another cut, exponent or divisor")));
  EXPECT_THAT(mismatch([&](Communicator& world) {
                if (odd(world)) {
                  static_cast<void>(world.split(0, 0));
                } else {
                  static_cast<void>(world.allocate(10, Dtype::kF32));
                }
              }),
              AllOf(HasSubstr("expected allocate of f32"), HasSubstr("got split (rank 1)")));
}

TEST_P(Failure, ARankThatDoesNotComeIsNamedByAll) {
  const auto start = std::chrono::steady_clock::now();
  std::latch done(3);
  run_world(shape(4, milliseconds(300)), [&](Communicator& world) {
    const Memory data(world, GetParam(), 1'000, Dtype::kF32);
    if (world.rank() == 1) {
      done.wait();
      return;
    }
    std::vector<int> ranks;
    const std::string message = message_of<TimeoutError>(
        [&] { world.all_reduce({.data = data.view(), .bucket = 7}); }, &ranks);
    EXPECT_THAT(message, AllOf(HasSubstr("all_reduce of bucket 7"), HasSubstr("rank 1")));
    EXPECT_THAT(ranks, ElementsAre(1));
    done.count_down();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(15'000));
}

TEST_P(Failure, TheEndOfTheChainOfWaitsIsAtFault) {
  std::latch done(3);
  run_world(shape(4, milliseconds(400)), [&](Communicator& world) {
    // Rank r waits for r + 1 in a group of the two; 3 does nothing.
    std::vector<Communicator> pairs;
    for (int low = 0; low < 3; ++low) {
      const bool member = world.rank() == low || world.rank() == low + 1;
      pairs.push_back(world.split(member ? 0 : -1, world.rank()));
    }
    if (world.rank() == 3) {
      done.wait();
      return;
    }
    std::vector<int> ranks;
    const std::string message = message_of<TimeoutError>(
        [&] { pairs[static_cast<std::size_t>(world.rank())].barrier(); }, &ranks);
    EXPECT_THAT(message, HasSubstr("rank 3 of 4 did not arrive within"));
    EXPECT_THAT(ranks, ElementsAre(3));
    done.count_down();
  });
}

TEST_P(Failure, AbortReachesRanksThatWait) {
  run_world(shape(3), [](Communicator& world) {
    if (world.rank() == 0) {
      world.abort("the disk is full");
      return;
    }
    std::vector<int> ranks;
    const std::string message = message_of<RankError>([&] { world.barrier(); }, &ranks);
    EXPECT_THAT(message, HasSubstr("the disk is full"));
    EXPECT_THAT(ranks, ElementsAre(0));
    EXPECT_EQ(message_of<RankError>([&] { static_cast<void>(world.split(0, 0)); }), message);
  });
}

TEST_P(Failure, AsynchronousCallsFailOnTheStream) {
  run_world(shape(2), [](Communicator& world) {
    Stream stream = Stream::host_worker("comm");
    const Memory data(world, GetParam(), 10, Dtype::kF32);
    world.all_reduce(data.view().slice(0, 10 - world.rank()), stream);
    EXPECT_THAT(message_of<MismatchError>([&] { stream.synchronize(); }),
                HasSubstr("do not match"));
  });
}

milliseconds thread_cpu_time() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  const auto in_ms = [](const timeval& time) { return time.tv_sec * 1000 + time.tv_usec / 1000; };
  return milliseconds(in_ms(usage.ru_utime) + in_ms(usage.ru_stime));
}

TEST_P(Failure, WaitingCostsLittle) {
  run_world(shape(2), [](Communicator& world) {
    const Memory data(world, GetParam(), 1'000, Dtype::kF32);
    world.all_reduce(data.view());
    if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(1'000));
    const milliseconds before = thread_cpu_time();
    world.all_reduce(data.view());
    EXPECT_LT(thread_cpu_time() - before, milliseconds(50)) << "of 1000 ms";
  });
}

TEST_P(Failure, MoreRanksThanCoresMakeProgress) {
  const auto start = std::chrono::steady_clock::now();
  run_world(shape(8), [](Communicator& world) {
    const Memory data(world, GetParam(), 20'000, Dtype::kF32);
    for (std::int64_t i = 0; i < 20'000; ++i) set(data.view(), i, 1.0);
    for (int round = 0; round < 7; ++round) world.all_reduce(data.view());
    EXPECT_EQ(get(data.view(), 19'999), 2097152.0);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(60'000));
}

INSTANTIATE_TEST_SUITE_P(Host, Failure,
                         testing::Values(Path::kDirect, Path::kPrivate, Path::kTcp, Path::kMixed),
                         [](const auto& chosen) { return name(chosen.param); });

}  // namespace
}  // namespace hsdp::test
