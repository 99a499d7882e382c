// Reports of all ranks to the first one: one after the other, in parts, and however long each
// takes.
#include "hsdp/comm/rank_reports.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "hsdp/error.h"
#include "tests/comm/rank_threads.h"

namespace hsdp::test {
namespace {

using ::testing::ElementsAre;

constexpr std::string_view kAct = "report";

TEST(RankReports, ReachTheFirstRankInTheGroupsOrder) {
  run_world({.size = 4}, [](Communicator& world) {
    const int color = world.rank() == 1 ? 1 : 0;
    Communicator group = world.split(color, -world.rank());  // ranks 3 2 0, and 1 alone
    std::vector<std::int64_t> said;
    comm::report_to_first(group, group.next_exchange_key(), comm::Saying{.sum = {world.rank()}},
                          kAct, [&](int rank, const comm::Agreement& report) {
                            EXPECT_EQ(report.sum.at(0), group.world_rank(rank));
                            said.push_back(report.sum.at(0));
                          });
    if (world.rank() == 3) {
      EXPECT_THAT(said, ElementsAre(3, 2, 0));
    } else if (world.rank() == 1) {
      EXPECT_THAT(said, ElementsAre(1));
    } else {
      EXPECT_THAT(said, ElementsAre());
    }
  });
}

// Each rank has one part more than the rank before it.
TEST(RankReports, MayHaveManyParts) {
  run_world({.size = 3}, [](Communicator& world) {
    std::vector<std::string> said;
    int part_count = 0;
    const auto next = [&](comm::Saying& part) {
      part.note = std::to_string(world.rank()) + "." + std::to_string(part_count);
      return part_count++ < world.rank();
    };
    comm::report_to_first(world, world.next_exchange_key(), next, kAct,
                          [&](int rank, const comm::Agreement& part) {
                            said.push_back(std::to_string(rank) + ":" + part.note);
                          });
    EXPECT_EQ(part_count, world.rank() + 1);
    if (world.rank() == 0) {
      EXPECT_THAT(said, ElementsAre("0:0.0", "1:1.0", "1:1.1", "2:2.0", "2:2.1", "2:2.2"));
    } else {
      EXPECT_THAT(said, ElementsAre());
    }
  });
}

// Each part takes less than the timeout, all together take longer.
TEST(RankReports, MayTakeLongerThanTheTimeout) {
  constexpr std::chrono::milliseconds kTimeout{1000};
  run_world({.size = 4, .timeout = kTimeout}, [&](Communicator& world) {
    int part_count = 0;
    const auto next = [&](comm::Saying& part) {
      if (world.rank() < 2) std::this_thread::sleep_for(kTimeout / 5);
      part.sum = {1};
      return ++part_count < 7;
    };
    std::int64_t taken = 0;
    comm::report_to_first(world, world.next_exchange_key(), next, kAct,
                          [&](int, const comm::Agreement& part) { taken += part.sum.at(0); });
    EXPECT_EQ(taken, world.rank() == 0 ? 4 * 7 : 0);
  });
}

// A wait for one's turn also ends.
TEST(RankReports, EndWithARankThatSaysNothing) {
  constexpr std::chrono::milliseconds kTimeout{500};
  run_world({.size = 3, .timeout = kTimeout}, [&](Communicator& world) {
    if (world.rank() == 1) return std::this_thread::sleep_for(3 * kTimeout);
    EXPECT_THROW(comm::report_to_first(world, world.next_exchange_key(), comm::Saying{}, kAct,
                                       [](int, const comm::Agreement&) {}),
                 TimeoutError);
  });
}

}  // namespace
}  // namespace hsdp::test
