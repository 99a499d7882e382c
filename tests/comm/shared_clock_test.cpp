// Aligning the clocks of several ranks.
#include "hsdp/comm/shared_clock.h"

#include <gtest/gtest.h>

#include <cmath>

#include "hsdp/comm/operation_record.h"
#include "tests/comm/rank_threads.h"

namespace hsdp::test {
namespace {

// Threads share a clock, so the offset that each adds is known.
TEST(SharedClock, FindsHowFarClocksAreApart) {
  run_world({.size = 4}, [](Communicator& world) {
    const double ahead_s = 5.0 * world.rank();
    const comm::ClockOffset clock = comm::measure_clock(
        world, world.next_exchange_key(), [&] { return Operations::now_s() + ahead_s; });
    EXPECT_LE(std::abs(clock.offset_s + ahead_s), clock.error_s) << world.rank();
    EXPECT_LT(clock.error_s, 0.5);
    EXPECT_EQ(clock.error_s > 0, world.rank() > 0);
  });
}

// A clock that is read late reports that: no rank's error bound is below the true error.
TEST(SharedClock, SaysTheErrorOfASlowRank) {
  run_world({.size = 2}, [](Communicator& world) {
    const comm::ClockOffset clock = comm::measure_clock(world, world.next_exchange_key(), [&] {
      const double now_s = Operations::now_s();
      if (world.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      return now_s;
    });
    if (world.rank() == 1) {
      EXPECT_GT(clock.error_s, 1e-3);
      EXPECT_LE(std::abs(clock.offset_s), clock.error_s);
    }
  });
}

// Ten seconds pass halfway, and this rank's clock runs too fast by as much as clocks do.
TEST(SharedClock, SaysTheErrorOfAClockThatComesApartMeanwhile) {
  run_world({.size = 2}, [](Communicator& world) {
    const double rate = world.rank() == 1 ? 1 + comm::kMostDrift : 1;
    int reads = 0;
    const comm::ClockOffset clock = comm::measure_clock(world, world.next_exchange_key(), [&] {
      return Operations::now_s() + (++reads > 16 ? 10 * rate : 0.0);
    });
    const double ahead_s = world.rank() == 1 ? 10 * comm::kMostDrift : 0;
    EXPECT_LE(std::abs(clock.offset_s + ahead_s), clock.error_s);
  });
}

TEST(SharedClock, IsThatOfTheFirstRankOfAGroup) {
  run_world({.size = 4}, [](Communicator& world) {
    Communicator pair = world.split(world.rank() % 2, -world.rank());  // 2 0 and 3 1
    const comm::ClockOffset clock = comm::measure_clock(
        pair, pair.next_exchange_key(), [&] { return Operations::now_s() + 3.0 * world.rank(); });
    EXPECT_LE(std::abs(clock.offset_s - (pair.rank() == 0 ? 0.0 : 6.0)), clock.error_s);
  });
}

}  // namespace
}  // namespace hsdp::test
