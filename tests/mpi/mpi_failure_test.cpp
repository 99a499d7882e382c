// A call that goes wrong ends the world on every rank, with the error of the host engine, and MPI
// goes on to serve the next world.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <thread>
#include <vector>

#include "hsdp/comm/engine.h"
#include "hsdp/error.h"
#include "tests/mpi/mpi_ranks.h"

namespace hsdp::test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

template <typename E>
std::string message_of(const std::function<void()>& call, std::vector<int>* ranks = nullptr) {
  try {
    call();
  } catch (const E& error) {
    if (ranks != nullptr) *ranks = error.ranks();
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

TEST(MpiFailure, AMismatchIsNamedByAllBeforeAnyDataMoves) {
  Communicator world = fresh_world();
  const bool odd = world.rank() == world.size() - 1;
  std::vector<float> data(100'000, 1.0F);
  std::vector<int> ranks;
  const std::string message = message_of<MismatchError>(
      [&] {
        world.all_reduce(TensorView{data.data(), odd ? 10 : 100'000});
      },
      &ranks);
  EXPECT_THAT(
      message,
      AllOf(HasSubstr("mpi: the ranks' calls do not match"), HasSubstr("all_reduce of 100000 f32"),
            HasSubstr("all_reduce of 10 f32 (rank " + std::to_string(world.size() - 1) + ")")));
  EXPECT_THAT(ranks, ElementsAre(world.size() - 1));
  EXPECT_EQ(data, std::vector<float>(100'000, 1.0F));
  EXPECT_EQ(message_of<MismatchError>([&] { world.barrier(); }), message);
}

TEST(MpiFailure, AnotherOperationAndOtherTermsAreNamed) {
  {
    Communicator world = fresh_world();
    std::vector<float> data(8, 1.0F);
    EXPECT_THAT(message_of<MismatchError>([&] {
                  world.rank() == 0 ? world.barrier() : world.broadcast({data.data(), 8});
                }),
                AllOf(HasSubstr("broadcast of 8 f32 from rank 0"), HasSubstr("barrier")));
  }
  {
    Communicator world = fresh_world();
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(world.size()) + 1, 2);
    offsets[0] = 0;
    if (world.rank() == 0) offsets[1] = 1;
    const RowCut cut(offsets);
    std::vector<float> in(2);
    std::vector<float> out(in.size() * static_cast<std::size_t>(world.size()));
    EXPECT_THAT(message_of<MismatchError>([&] {
                  world.all_to_all(TensorView{in.data(), 2},
                                   {out.data(), world.size() * cut.length(world.rank())},
                                   Stream::inline_host(), cut, 6);
                }),
                AllOf(HasSubstr("all_to_all of 2 f32 of bucket 6"),
                      HasSubstr("with another cut, exponent or divisor")));
  }
  Communicator world = fresh_world();
  std::vector<float> data(8, 1.0F);
  EXPECT_THAT(
      message_of<MismatchError>([&] {
        world.all_reduce({.data = {data.data(), 8}, .divisor = world.rank() == 0 ? 2.0F : 3.0F});
      }),
      HasSubstr("with another cut, exponent or divisor"));
}

TEST(MpiFailure, ARankThatDoesNotComeIsNamedByAll) {
  Communicator world = fresh_world("mpi", milliseconds(500));
  std::vector<float> data(1'000'000, 1.0F);
  if (world.rank() == 1) {
    // Lives, and does not come, until the others have given up.
    const comm::Control& control = world.engine()->control();
    for (int i = 0; i < 10'000 && !control.failed(); ++i) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    return;
  }
  std::vector<int> ranks;
  const std::string message = message_of<TimeoutError>(
      [&] {
        world.all_reduce({.data = {data.data(), std::ssize(data)}, .bucket = 7});
      },
      &ranks);
  EXPECT_THAT(message, AllOf(HasSubstr("all_reduce of bucket 7"), HasSubstr("rank 1")));
  EXPECT_THAT(ranks, ElementsAre(1));
}

TEST(MpiFailure, AbortReachesRanksThatWait) {
  Communicator world = fresh_world();
  if (world.rank() == 0) {
    world.barrier();
    world.abort("the disk is full");
    return;
  }
  std::vector<int> ranks;
  const auto wait_twice = [&] {
    world.barrier();
    world.barrier();
  };
  EXPECT_THAT(message_of<RankError>(wait_twice, &ranks), HasSubstr("the disk is full"));
  EXPECT_THAT(ranks, ElementsAre(0));
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

// MPI itself is unharmed by all of the above.
TEST(MpiFailure, TheNextWorldWorks) {
  Communicator world = fresh_world();
  std::vector<float> data(500'000, static_cast<float>(world.rank()));
  world.all_reduce(TensorView{data.data(), std::ssize(data)});
  const int n = world.size();
  EXPECT_EQ(data, std::vector<float>(500'000, static_cast<float>(n * (n - 1) / 2)));
}

}  // namespace
}  // namespace hsdp::test
