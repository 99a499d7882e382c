// Groups, shared memory and misuse on the host engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <latch>
#include <limits>

#include "hsdp/error.h"
#include "tests/comm/elements.h"
#include "tests/comm/rank_threads.h"
#include "tests/support/failing_calls.h"

namespace hsdp::test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

void expect_sum(Communicator& group, TensorView data) {
  double sum = 0.0;
  for (const int world_rank : group.world_ranks()) sum += world_rank + 1;
  const int own = group.world_ranks()[static_cast<std::size_t>(group.rank())] + 1;
  fill(data, [own](std::int64_t /*i*/) { return own; });
  group.all_reduce(data);
  expect_elements(data, [sum](std::int64_t /*i*/) { return sum; });
}

class Group : public testing::TestWithParam<Path> {};

TEST_P(Group, SplitOrdersByKeyAndLeavesOutNegativeColors) {
  run_world({.size = 5, .path = GetParam()}, [](Communicator& world) {
    // Rank 4 in none; 0 and 2, 1 and 3 together, in reverse order.
    Communicator group = world.split(world.rank() == 4 ? -1 : world.rank() % 2, -world.rank());
    if (world.rank() == 4) {
      EXPECT_EQ(group.size(), 0);
      EXPECT_FALSE(group);
      EXPECT_THROW(group.barrier(), UsageError);
      return;
    }
    ASSERT_EQ(group.size(), 2);
    EXPECT_THAT(group.world_ranks(), ElementsAre(world.rank() % 2 + 2, world.rank() % 2));
    EXPECT_EQ(group.rank(), world.rank() < 2 ? 1 : 0);
    const Memory data(group, GetParam(), 1'000, Dtype::kF32);
    expect_sum(group, data.view());
  });
}

TEST_P(Group, SplitsOfSplitsDownToOneRank) {
  run_world({.size = 4, .path = GetParam()}, [](Communicator& world) {
    Communicator half = world.split(world.rank() / 2, world.rank());
    Communicator one = half.split(half.rank(), 0);
    Communicator again = one.split(0, 0);
    Communicator twice = one.split(0, 0);
    EXPECT_EQ(one.size(), 1);
    EXPECT_EQ(twice.transport(), Transport::kNone);
    EXPECT_THAT(again.world_ranks(), ElementsAre(world.rank()));
    const Memory data(half, GetParam(), 77, Dtype::kF32);
    expect_sum(half, data.view());
    const Memory alone(one, GetParam(), 77, Dtype::kF32);
    expect_sum(one, alone.view());
  });
}

TEST_P(Group, TwoCommunicatorsRunOnTwoThreads) {
  run_world({.size = 3, .path = GetParam()}, [](Communicator& world) {
    Communicator other = world.split(0, 0);
    const Memory a(world, GetParam(), 30'000, Dtype::kF32);
    const Memory b(other, GetParam(), 30'000, Dtype::kF32);
    run_each(2, [&](std::size_t which) {
      for (int round = 0; round < 20; ++round) {
        expect_sum(which == 0 ? world : other, which == 0 ? a.view() : b.view());
      }
    });
  });
}

TEST_P(Group, SeveralWorldsOverOneControl) {
  const auto controls = comm::in_process_control(2, std::chrono::milliseconds(10'000));
  const auto choice = GetParam() == Path::kTcp ? TransportChoice::kTcp : TransportChoice::kAuto;
  run_each(2, [&](std::size_t r) {
    Communicator first = comm::host_world(controls[r], choice);
    Communicator second = comm::host_world(controls[r], choice);
    const Memory data(second, GetParam(), 100, Dtype::kF32);
    expect_sum(first, data.view());
    expect_sum(second, data.view());
  });
}

INSTANTIATE_TEST_SUITE_P(Host, Group,
                         testing::Values(Path::kDirect, Path::kPrivate, Path::kTcp, Path::kMixed),
                         [](const auto& chosen) { return name(chosen.param); });

// Rank 1 has nothing to wait for: rank 2 comes once rank 1 is done.
TEST(Planned, CallsOverSocketsAreNoMeeting) {
  std::latch done(1);
  run_world({.size = 3, .path = Path::kTcp}, [&](Communicator& world) {
    const Memory in(world, Path::kTcp, 100, Dtype::kF32);
    const Memory out(world, Path::kTcp, 100, Dtype::kF32);
    const RowCut cut({0, 100, 100, 100});  // all of it belongs to rank 0
    const TensorView sums = out.view().slice(0, cut.length(world.rank()));
    for (const bool first : {true, false}) {
      fill(in.view(), [&](std::int64_t i) { return small_integer(world.rank(), i); });
      if (!first && world.rank() == 2) done.wait();
      world.reduce_scatter({.in = in.view(), .out = sums, .cut = cut, .planned = true});
      if (!first && world.rank() == 1) done.count_down();
      expect_elements(sums, [](std::int64_t i) {
        return small_integer(0, i) + small_integer(1, i) + small_integer(2, i);
      });
    }
  });
}

TEST(SharedMemory, IsZeroAlignedAndMayDifferInSize) {
  run_world({.size = 3}, [](Communicator& world) {
    for (const std::int64_t count : {0, 1, 100'000, 3'000'000}) {
      const SharedMemory memory = world.allocate(count * world.rank(), Dtype::kF32);
      ASSERT_EQ(memory.view().count, count * world.rank());
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(memory.view().data) % 4096, 0U);
      expect_elements(memory.view(), [](std::int64_t /*i*/) { return 0.0; });
    }
  });
}

TEST(SharedMemory, OutlivesItsCommunicator) {
  SharedMemory kept[2];
  run_world({.size = 2}, [&](Communicator& world) {
    kept[world.rank()] = world.allocate(1'000, Dtype::kF64);
    set(kept[world.rank()].view(), 999, 5.0);
  });
  for (const SharedMemory& memory : kept) {
    const SharedMemory copy = memory;  // NOLINT(performance-unnecessary-copy-initialization)
    set(copy.view(), 0, 1.0);
    EXPECT_EQ(get(memory.view(), 0) + get(copy.view(), 999), 6.0);
  }
}

TEST(SharedMemory, ServesEveryGroupOfTheRanksThatMapIt) {
  run_world({.size = 4}, [](Communicator& world) {
    Communicator half = world.split(world.rank() / 2, world.rank());
    const SharedMemory wide = world.allocate(10'000, Dtype::kF32);
    const SharedMemory narrow = half.allocate(10'000, Dtype::kF32);
    expect_sum(half, wide.view());
    expect_sum(half, narrow.view());
    expect_sum(world, narrow.view());  // the other half does not map it, so messages carry it
    expect_sum(world, wide.view().slice(1, 9'998));
  });
}

TEST(SharedMemory, MixesWithPrivateMemoryAndMayBeDroppedOnOneRank) {
  run_world({.size = 3}, [](Communicator& world) {
    SharedMemory memory = world.allocate(5'000, Dtype::kF32);
    std::vector<float> other(5'000);
    const TensorView own{other.data(), 5'000};
    expect_sum(world, world.rank() == 0 ? own : memory.view());
    if (world.rank() == 1) memory = SharedMemory();
    for (int round = 0; round < 3; ++round) {
      expect_sum(world, world.rank() == 1 ? own : memory.view());
      SharedMemory fresh = world.allocate(5'000, Dtype::kF32);
      expect_sum(world, fresh.view());
    }
  });
}

TEST(SharedMemory, AForkedChildThatDropsItTakesNothingFromTheParent) {
  run_world({.size = 2}, [](Communicator& world) {
    SharedMemory memory = world.allocate(1'000, Dtype::kF32);
    if (world.rank() == 0) {
      const pid_t child = fork();
      if (child == 0) {
        memory = SharedMemory();
        _exit(0);
      }
      ASSERT_EQ(waitpid(child, nullptr, 0), child);
    }
    static_cast<void>(world.allocate(1, Dtype::kF32));  // dropped at once
    world.barrier();
    expect_sum(world, memory.view());
  });
}

TEST(SharedMemory, TooLargeARequestFailsEverywhereAndHarmsNothing) {
  run_world({.size = 2}, [](Communicator& world) {
    const std::int64_t count = world.rank() == 1 ? std::int64_t{1} << 58 : 10;
    EXPECT_THAT([&] { static_cast<void>(world.allocate(count, Dtype::kF64)); },
                ThrowsMessage<Error>(AllOf(HasSubstr("rank 1 of 2"), HasSubstr("allocation"))));
    const SharedMemory memory = world.allocate(10, Dtype::kF32);
    expect_sum(world, memory.view());
  });
}

// A rank can allocate its own memory but map none of a peer's. Every rank is told at once, also in
// the other groups that are made in the same call and will be used together.
TEST(SharedMemory, ThatOneRankCannotMapFailsEverywhereAndHarmsNothing) {
  const auto allocate = [](Communicator& world) {
    static_cast<void>(world.allocate(10, Dtype::kF32));
  };
  const auto split = [](Communicator& world) { static_cast<void>(world.split(0, world.rank())); };
  const auto split_in_two = [](Communicator& world) {
    static_cast<void>(world.split(world.rank() % 2, 0));
  };
  const struct {
    std::string title;
    Path path;
    int skipped;  // calls that work
    std::function<void(Communicator& world)> call;
  } rows[] = {{"allocation", Path::kDirect, 1, allocate},
              {"allocation on two hosts", Path::kMixed, 1, allocate},
              {"group", Path::kDirect, 2, split},
              {"group on two hosts", Path::kMixed, 2, split},
              {"two groups", Path::kDirect, 2, split_in_two}};
  for (const auto& row : rows) {
    run_world(
        {.size = 4, .path = row.path, .stage = {.processes = true}}, [&](Communicator& world) {
          SCOPED_TRACE(row.title);
          for (int bad = 0; bad < world.size(); ++bad) {
            const bool own = world.rank() == bad;
            if (own) fail_call(FailingCall::kMadvise, row.skipped);
            const auto start = std::chrono::steady_clock::now();
            EXPECT_THAT(
                [&] { row.call(world); },
                ThrowsMessage<Error>(AllOf(HasSubstr("host memory"), HasSubstr("for a peer"),
                                           HasSubstr("(rank " + std::to_string(bad) + " of 4)"))));
            EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
            EXPECT_EQ(call_has_failed(), own);
            const SharedMemory memory = world.allocate(10, Dtype::kF32);
            expect_sum(world, memory.view());
            world.split(0, world.rank()).barrier();
          }
        });
  }
}

TEST(Misuse, BadArgumentsAreUsageErrorsAndHarmNothing) {
  run_world({.size = 2}, [](Communicator& world) {
    std::vector<float> data(100);
    const TensorView f32{data.data(), 100};
    const TensorView u8{data.data(), 100, Dtype::kU8};
    const TensorView half{data.data() + 50, 50};
    std::vector<float> row(50);
    const TensorView out{row.data(), 50};
    EXPECT_THROW(world.all_reduce(u8), UsageError);
    EXPECT_THROW(world.all_reduce(TensorView{nullptr, 3}), UsageError);
    EXPECT_THROW(world.all_reduce(TensorView{data.data(), -1}), UsageError);
    EXPECT_THROW(world.all_reduce({.data = f32, .wire = Dtype::kF64}), UsageError);
    EXPECT_THROW(world.all_reduce({.data = f32, .divisor = 0.0F}), UsageError);
    EXPECT_THROW(world.all_reduce({.data = f32, .divisor = NAN}), UsageError);
    EXPECT_THROW(world.all_reduce({.data = f32, .divisor = 1e-46}), UsageError) << "0 in fp32";
    EXPECT_THROW(world.all_reduce({.data = f32, .divisor = 1e300}), UsageError);
    std::atomic<std::uint32_t> flag{0};
    EXPECT_THROW(world.all_reduce({.data = {data.data(), 4, Dtype::kI64}, .nonfinite = &flag}),
                 UsageError);
    EXPECT_THROW(world.reduce_scatter(f32, half), UsageError);  // they overlap
    EXPECT_THROW(world.reduce_scatter(f32, out.slice(0, 49)), UsageError);
    EXPECT_THROW(world.reduce_scatter({.in = f32, .out = out, .cut = RowCut(100, 3)}), UsageError);
    EXPECT_THROW(world.reduce_scatter({.in = f32, .out = out, .cut = RowCut(99, 2)}), UsageError);
    EXPECT_THROW(world.all_gather(out, TensorView{data.data(), 100, Dtype::kBf16}), UsageError);
    EXPECT_THROW(world.all_to_all(f32, f32), UsageError);
    EXPECT_THROW(world.all_to_all(f32.slice(0, 3), out.slice(0, 3)), UsageError);
    EXPECT_THROW(world.broadcast(f32, 2), UsageError);
    EXPECT_THROW(static_cast<void>(world.allocate(-1, Dtype::kF32)), UsageError);
    EXPECT_THROW(world.all_reduce(TensorView{data.data(), 4, Dtype::kF32, {DeviceType::kCuda, 0}}),
                 UsageError);
    EXPECT_THROW(static_cast<void>(in_process_world(1, {.engine = "nccl"})), UsageError);
    EXPECT_THROW(static_cast<void>(in_process_world(1, {.timeout = milliseconds(-1)})), UsageError);
    EXPECT_THROW(static_cast<void>(in_process_world(1, {.timeout = milliseconds(0)})), UsageError);
    EXPECT_THROW(static_cast<void>(in_process_world(1, {.timeout = milliseconds::max()})),
                 UsageError);
    EXPECT_THROW(RowCut({0, 5, 4}), UsageError);
    EXPECT_THROW(RowCut(-1, 2), UsageError);
    expect_sum(world, f32);
  });
}

TEST(Misuse, OfTheCutOfAnAllToAllIsNamed) {
  run_world({.size = 3}, [](Communicator& world) {
    std::vector<float> data(200);
    const TensorView in{data.data(), 100};
    const TensorView out{data.data() + 100, 100};
    const auto expect_error = [&](ConstTensorView from, TensorView to, const RowCut& cut,
                                  const std::string& message) {
      EXPECT_THAT([&] { world.all_to_all(from, to, Stream::inline_host(), cut, {1}); },
                  ThrowsMessage<UsageError>(HasSubstr("all_to_all: " + message)));
    };
    const RowCut even({0, 10, 20, 30});
    expect_error(in.slice(0, 30), out.slice(0, 30), RowCut(30, 4),
                 "cut: expected 3 rows, got 4 (rank " + std::to_string(world.rank()) + " of 3)");
    expect_error(in.slice(0, 31), out.slice(0, 30), even, "cut: expected 31 elements, got 30");
    for (const std::int64_t wrong : {0, 10, 29, 31, 33}) {
      expect_error(in.slice(0, 30), out.slice(0, wrong), even,
                   "output: expected 3 rows of 10 elements each, got " + std::to_string(wrong));
    }
    expect_error(in.slice(0, 30), in.slice(0, 30), even, "memory: expected an output apart");
    expect_error(in.slice(0, 30), in.slice(29, 30), even, "memory: expected an output apart");
    // The bytes of one row overflow, and the elements of all rows together.
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 2;
    expect_error({data.data(), kMost, Dtype::kU8}, {data.data(), 1, Dtype::kU8},
                 RowCut({0, world.rank() == 0 ? kMost : 0, world.rank() < 2 ? kMost : 0, kMost}),
                 "output: expected 3 rows of " + std::to_string(kMost) + " elements each, got 1");
    EXPECT_THAT([&] { world.all_to_all(in.slice(0, 31), out.slice(0, 31)); },
                ThrowsMessage<UsageError>(HasSubstr("a multiple of 3, or a cut, got 31")));
    expect_sum(world, in);
  });
}

// In a group of one no other rank would notice a count whose size in bytes overflows.
TEST(Misuse, CountsWhoseBytesOverflowAreRefused) {
  run_world({.size = 1}, [](Communicator& world) {
    float in = 1.0F;
    float out = 0.0F;
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    for (const std::int64_t count : {kMost, kMost / 4, kMost / 8 + 1}) {
      const TensorView a{&in, count};
      const TensorView b{&out, count};
      EXPECT_THROW(world.all_reduce(a), UsageError);
      EXPECT_THROW(world.reduce_scatter(a, b), UsageError);
      EXPECT_THROW(world.all_gather(a, b), UsageError);
      EXPECT_THROW(world.all_to_all(a, b), UsageError);
      EXPECT_THROW(world.broadcast(a), UsageError);
      EXPECT_THROW(static_cast<void>(world.allocate(count, Dtype::kF32)), UsageError);
    }
    EXPECT_EQ(in, 1.0F);
  });
}

TEST(Misuse, TwoThreadsOnOneCommunicatorAreRefused) {
  std::latch refused(1);
  run_world({.size = 2}, [&](Communicator& world) {
    if (world.rank() == 1) {
      refused.wait();
      world.barrier();
      return;
    }
    // The thread that comes first waits for rank 1, which waits until the other thread was refused.
    run_each(2, [&](std::size_t) {
      try {
        world.barrier();
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr("two threads"));
        refused.count_down();
      }
    });
  });
}

}  // namespace
}  // namespace hsdp::test
