// A failed call ends the world on every rank with the same error as on the host engine, and MPI
// serves the next world.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/engine.h"
#include "hsdp/error.h"
#include "tests/comm/blames.h"
#include "tests/mpi/mpi_ranks.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::test {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(MpiFailure, AMismatchIsNamedByAllBeforeAnyDataMoves) {
  const struct {
    std::function<void(Communicator& world, TensorView data, bool odd)> call;
    std::vector<std::string> named;
  } rows[] = {
      {[](auto& world, auto data, bool odd) { world.all_reduce(data.slice(0, odd ? 10 : 99)); },
       {"mpi: the ranks' calls do not match", "all_reduce of 99 f32",
        "all_reduce of 10 f32 (rank "}},
      {[](auto& world, auto data, bool odd) { odd ? world.barrier() : world.broadcast(data); },
       {"broadcast of 100 f32 from rank 0", "barrier"}},
      {[](auto& world, auto data, bool odd) {
         world.all_reduce({.data = data, .divisor = odd ? 2.0F : 3.0F});
       },
       {"with another cut, exponent or divisor"}},
      {[](auto& world, auto data, bool odd) {
         std::vector<std::int64_t> offsets(static_cast<std::size_t>(world.size()) + 1, 100);
         offsets[0] = 0;
         if (odd) offsets[1] = 1;
         const RowCut cut(offsets);
         std::vector<float> out(100 * offsets.size());
         world.all_to_all(data, {out.data(), world.size() * cut.length(world.rank())},
                          Stream::inline_host(), cut, {6});
       },
       {"all_to_all of 100 f32 of bucket 6", "with another cut, exponent or divisor"}},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.named[0]);
    Communicator world = fresh_world();
    const int odd_rank = world.size() - 1;
    std::vector<float> data(100, 1.0F);
    const auto error = caught<MismatchError>([&] {
      row.call(world, {data.data(), std::ssize(data)}, world.rank() == odd_rank);
    });
    ASSERT_TRUE(error);
    for (const std::string& text : row.named) EXPECT_THAT(error->what(), HasSubstr(text));
    EXPECT_THAT(error->ranks(), ElementsAre(odd_rank));
    EXPECT_EQ(data, std::vector<float>(100, 1.0F));
    EXPECT_THAT([&] { world.barrier(); }, ThrowsMessage<MismatchError>(error->what()));
  }
}

TEST(MpiFailure, PlannedCallsInAnotherOrderAreNamedByTheLookAtThem) {
  Communicator world = fresh_world();
  const int odd_rank = world.size() - 1;
  std::vector<float> data(100);
  const auto make = [&](const std::vector<int>& buckets) {
    for (const int bucket : buckets) {
      std::ranges::fill(data, 1.0F);
      world.all_reduce(
          {.data = {data.data(), std::ssize(data)}, .bucket = bucket, .planned = true});
      EXPECT_EQ(data, std::vector<float>(100, static_cast<float>(world.size())));
    }
  };
  make({0, 1, 2});
  world.compare_calls("first");
  make(world.rank() == odd_rank ? std::vector<int>{0, 2, 1} : std::vector<int>{0, 1, 2});
  const auto error = caught<MismatchError>([&] { world.compare_calls("second"); });
  ASSERT_TRUE(error);
  EXPECT_THAT(error->what(), HasSubstr("expected all_reduce of 100 f32 of bucket 1 (rank"));
  EXPECT_THAT(error->what(), HasSubstr("got all_reduce of 100 f32 of bucket 2 (rank " +
                                       std::to_string(odd_rank) + ")"));
}

TEST(MpiFailure, ARankThatDoesNotComeIsNamedByAll) {
  Communicator world = fresh_world("mpi", milliseconds(500));
  std::vector<float> data(1'000'000, 1.0F);
  if (world.rank() == 1) {
    // The process is alive but does not come until the others have given up.
    const comm::Control& control = world.engine()->control();
    for (int i = 0; i < 10'000 && !control.failed(); ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return;
  }
  EXPECT_THAT(
      [&] {
        world.all_reduce({.data = {data.data(), std::ssize(data)}, .bucket = 7});
      },
      blames<TimeoutError>({1}, {"all_reduce of bucket 7", "rank 1"}));
}

TEST(MpiFailure, AbortReachesRanksThatWait) {
  Communicator world = fresh_world();
  if (world.rank() == 0) {
    world.barrier();
    world.abort("the disk is full");
    return;
  }
  const auto wait_twice = [&] {
    world.barrier();
    world.barrier();
  };
  EXPECT_THAT(wait_twice, blames<RankError>({0}, {"the disk is full"}));
}

milliseconds process_cpu_time() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto in_ms = [](const timeval& time) { return time.tv_sec * 1000 + time.tv_usec / 1000; };
  return milliseconds(in_ms(usage.ru_utime) + in_ms(usage.ru_stime));
}

TEST(MpiFailure, WaitingCostsLittle) {
  run_in_group("mpi", [](Communicator& group) {
    std::vector<float> data(1'000, 1.0F);
    group.all_reduce(TensorView{data.data(), 1'000});
    if (group.rank() == 1) std::this_thread::sleep_for(milliseconds(1'000));
    const milliseconds before = process_cpu_time();
    group.all_reduce(TensorView{data.data(), 1'000});
    if (group.rank() != 1) {
      EXPECT_LT(process_cpu_time() - before, milliseconds(50)) << "of 1000 ms";
    }
  });
}

// None of the above has harmed MPI.
TEST(MpiFailure, TheNextWorldWorks) {
  Communicator world = fresh_world();
  std::vector<float> data(500'000, static_cast<float>(world.rank()));
  world.all_reduce(TensorView{data.data(), std::ssize(data)});
  const int n = world.size();
  EXPECT_EQ(data, std::vector<float>(500'000, static_cast<float>(n * (n - 1) / 2)));
}

}  // namespace
}  // namespace hsdp::test
