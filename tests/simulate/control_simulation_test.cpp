// The control plane in virtual time, and the simulator itself.
#include "tests/simulate/control_simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

namespace hsdp::simulate {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Outcome run(const Options& options) { return ControlSimulation(options).run(); }

// Kills before the event of that number, which has to come.
void expect_promises_kept(Options options, std::int64_t event, std::vector<int> killed) {
  options.kill_at = event;
  options.killed = std::move(killed);
  const Outcome outcome = run(options);
  EXPECT_GE(outcome.killed_us, 0);
  EXPECT_THAT(outcome.broken_promises, IsEmpty())
      << "killed rank " << options.killed[0] << " of " << options.killed.size() << " at event "
      << event << " of seed " << options.seed;
}

TEST(ControlSimulation, EveryLinkCarriesOneMessageEachWayAWord) {
  for (const int hosts : {1, 8, 64}) {
    const Options options{.hosts = hosts, .words = 5};
    const Outcome outcome = run(options);
    EXPECT_THAT(outcome.broken_promises, IsEmpty());
    EXPECT_EQ(outcome.links.size(), static_cast<std::size_t>(options.size() - 1));
    for (const auto& [rank, link] : outcome.links) {
      EXPECT_EQ(link.messages_out, options.words) << "to rank " << rank;
      EXPECT_EQ(link.messages_in, options.words) << "from rank " << rank;
    }
  }
}

TEST(ControlSimulation, WhatALinkCarriesForAWordIsBoundedForAnyNumberOfRanks) {
  for (const int hosts : {1, 8, 64, 512}) {
    for (const bool equal : {true, false}) {
      const Options options{.hosts = hosts, .words = 2, .equal_words = equal};
      const std::int64_t most = options.words * (equal ? 256 : 8'192);
      for (const auto& [rank, link] : run(options).links) {
        EXPECT_LE(link.bytes_out, most) << "to rank " << rank << " of " << options.size();
        EXPECT_LE(link.bytes_in, options.words * 256) << "from rank " << rank;
      }
    }
  }
}

TEST(ControlSimulation, ASeedGivesOneRunAndAnotherAnother) {
  const auto times = [](std::uint64_t seed) { return run({.hosts = 3, .seed = seed}).word_us; };
  EXPECT_EQ(times(1), times(1));
  EXPECT_NE(times(1), times(2));
}

// At every event, every rank and every host.
TEST(ControlSimulation, WhoeverIsKilledWheneverIsNamedByAllWithinTwoSeconds) {
  Options options{.hosts = 2, .ranks_per_host = 3, .words = 2, .equal_words = false};
  const std::vector<std::vector<int>> victims{{0}, {1},       {2},       {3},   {4},
                                              {5}, {0, 1, 2}, {3, 4, 5}, {2, 3}};
  for (options.seed = 1; options.seed <= victims.size(); ++options.seed) {
    const std::int64_t events = run(options).events;
    ASSERT_GT(events, 50);
    for (std::int64_t event = 0; event < events; ++event) {
      expect_promises_kept(options, event, victims[options.seed - 1]);
    }
  }
}

TEST(ControlSimulation, LargeWorldsKeepTheirPromisesToo) {
  Options options{.hosts = 16, .words = 3};
  for (int rank = 0; rank < options.size(); ++rank) {
    options.seed = static_cast<std::uint64_t>(rank);
    expect_promises_kept(options, 10 + 17 * rank, {rank});
  }
}

TEST(ControlSimulation, ARankThatIsNotToldOfTheEndIsFound) {
  const Outcome outcome = run({.hosts = 2, .kill_at = 30, .killed = {5}, .untold = 9});
  EXPECT_THAT(outcome.broken_promises, Contains(HasSubstr("rank 9 does not raise within 2 s")));
}

}  // namespace
}  // namespace hsdp::simulate
