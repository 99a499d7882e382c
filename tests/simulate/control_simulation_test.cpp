// Tests the control plane in virtual time, and the simulator itself.
#include "tests/simulate/control_simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

namespace hsdp::simulate {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Outcome run(const Options& options) { return ControlSimulation(options).run(); }

// Kills these ranks before `event`, which must occur.
void expect_promises_kept(Options options, std::int64_t event, std::vector<int> killed) {
  options.kill_at = event;
  options.killed = std::move(killed);
  const Outcome outcome = run(options);
  EXPECT_GE(outcome.killed_us, 0);
  EXPECT_THAT(outcome.broken_promises, IsEmpty())
      << "killed rank " << options.killed[0] << " of " << options.killed.size() << " at event "
      << event << " of seed " << options.seed;
}

// With the first word a relay also names the group of all ranks, so the first word is subtracted.
TEST(ControlSimulation, EveryLinkCarriesOneMessageEachWayAWord) {
  for (const int hosts : {1, 8, 64}) {
    Options options{.hosts = hosts, .words = 1};
    const Outcome first = run(options);
    options.words = 5;
    const Outcome outcome = run(options);
    EXPECT_THAT(outcome.broken_promises, IsEmpty());
    EXPECT_EQ(outcome.links.size(), static_cast<std::size_t>(options.size() - 1));
    for (const auto& [rank, link] : outcome.links) {
      EXPECT_EQ(link.messages_out - first.links.at(rank).messages_out, 4) << "to rank " << rank;
      EXPECT_EQ(link.messages_in - first.links.at(rank).messages_in, 4) << "from rank " << rank;
    }
  }
}

TEST(ControlSimulation, RankZeroHearsOneRankOfEachOtherHost) {
  const auto heard_by_0 = [](const Options& options) {
    return std::ranges::count_if(run(options).links,
                                 [](const auto& entry) { return entry.second.parent == 0; });
  };
  EXPECT_EQ(heard_by_0({.hosts = 2, .words = 1}), 15);  // few enough for a tree of one level
  EXPECT_EQ(heard_by_0({.hosts = 64, .words = 1}), 63 + 7);
  EXPECT_EQ(heard_by_0({.hosts = 1, .ranks_per_host = 128, .words = 1}), 16);
}

TEST(ControlSimulation, WhatALinkCarriesForAWordIsBoundedForAnyNumberOfRanks) {
  for (const int hosts : {1, 8, 64, 512}) {
    for (const bool equal : {true, false}) {
      const Options options{.hosts = hosts, .words = 2, .equal_words = equal};
      const std::int64_t most = options.words * (equal ? 256 : 8'192);
      std::int64_t by_rank_0 = 0;
      for (const auto& [rank, link] : run(options).links) {
        EXPECT_LE(link.bytes_out, most) << "to rank " << rank << " of " << options.size();
        EXPECT_LE(link.bytes_in, most) << "from rank " << rank;
        if (link.parent == 0) by_rank_0 += link.bytes_out;
      }
      EXPECT_LE(by_rank_0, equal ? options.words * 300'000 : most * 600);
    }
  }
}

TEST(ControlSimulation, ASeedGivesOneRunAndAnotherAnother) {
  const auto times = [](std::uint64_t seed) { return run({.hosts = 3, .seed = seed}).word_us; };
  EXPECT_EQ(times(1), times(1));
  EXPECT_NE(times(1), times(2));
}

// Each single rank, each whole host, and two ranks of different hosts.
std::vector<std::vector<int>> victims_of(const Options& options) {
  std::vector<std::vector<int>> victims;
  for (int rank = 0; rank < options.size(); ++rank) victims.push_back({rank});
  for (int host = 0; host < options.hosts; ++host) {
    auto& on_host = victims.emplace_back();
    for (int i = 0; i < options.ranks_per_host; ++i) {
      on_host.push_back(host * options.ranks_per_host + i);
    }
  }
  victims.push_back({options.ranks_per_host - 1, options.ranks_per_host});
  return victims;
}

// Kills at every event, with ranks linked to rank 0 directly and through up to two others.
TEST(ControlSimulation, WhoeverIsKilledWheneverIsNamedByAllWithinTwoSeconds) {
  for (Options options : {Options{.hosts = 2, .ranks_per_host = 3},
                          Options{.hosts = 2, .ranks_per_host = 4, .fan_out = 2}}) {
    options.words = 2;
    options.equal_words = false;
    for (const std::vector<int>& victims : victims_of(options)) {
      ++options.seed;
      const std::int64_t events = run(options).events;
      ASSERT_GT(events, 50);
      for (std::int64_t event = 0; event < events; ++event) {
        expect_promises_kept(options, event, victims);
      }
    }
  }
}

// 64 ranks, some linked through two others, and 4,096 ranks. HSDP_SEEDS sets the number of kills.
TEST(ControlSimulation, LargeWorldsKeepTheirPromisesToo) {
  const char* const asked = std::getenv("HSDP_SEEDS");
  const int seeds = asked != nullptr ? std::stoi(asked) : 3;
  Options options{.hosts = 4, .ranks_per_host = 16, .words = 3, .fan_out = 3};
  for (const std::vector<int>& victims : victims_of(options)) {
    for (int i = 0; i < seeds; ++i) {
      ++options.seed;
      const std::int64_t events = run(options).events;
      expect_promises_kept(options, static_cast<std::int64_t>(options.seed * 7'919) % events,
                           victims);
    }
  }
  Options largest{.hosts = 512, .words = 1};
  for (int i = 0; i < seeds / 3; ++i) {
    ++largest.seed;
    expect_promises_kept(largest, 9'000 + 97 * i, {(1'013 * i + 8) % largest.size()});
  }
}

// Tests the tests above: a rank that blames the peer of the first broken data link names one that
// is alive and only left because the world had ended.
TEST(ControlSimulation, WithoutPatienceWithDataLinksTheLivingAreNamed) {
  Options options{.hosts = 4, .ranks_per_host = 8, .words = 2, .patience = {}};
  options.fan_out = 2;
  bool is_seen = false;
  for (options.seed = 1; options.seed <= 200 && !is_seen; ++options.seed) {
    options.kill_at = 200;
    options.killed = {static_cast<int>(options.seed % 32)};
    is_seen = !run(options).broken_promises.empty();
  }
  EXPECT_TRUE(is_seen);
}

TEST(ControlSimulation, ARankThatIsNotToldOfTheEndIsFound) {
  const Outcome outcome = run({.hosts = 2, .kill_at = 30, .killed = {5}, .untold = 9});
  EXPECT_THAT(outcome.broken_promises, Contains(HasSubstr("rank 9 ")));
}

}  // namespace
}  // namespace hsdp::simulate
