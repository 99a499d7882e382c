// Which rank is at fault, as a table of the ranks' reports.
#include "hsdp/comm/control/world_end.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace hsdp::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr milliseconds kTimeout{3'000};

RankReport waiting_for(std::vector<int> awaited, int age_ms) {
  RankReport report;
  report.waits.push_back(
      {.id = 2, .operation = "all_reduce", .bucket = 1, .age = milliseconds(age_ms)});
  report.awaited.push_back(std::move(awaited));
  return report;
}

RankReport silent_for(int ms, RankReport report = {}) {
  report.silent = milliseconds(ms);
  return report;
}

RankReport closed(RankReport report) {
  report.closed = true;
  return report;
}

const RankReport kBusy{};

TEST(VerdictTest, NobodyIsAtFaultBeforeTheTimeoutOrAfterItsGoodbye) {
  EXPECT_FALSE(judge({kBusy, kBusy}, kTimeout));
  EXPECT_FALSE(judge({waiting_for({1}, 2'999), silent_for(2'999)}, kTimeout));
  EXPECT_FALSE(judge({kBusy, closed(silent_for(60'000))}, kTimeout));
}

TEST(VerdictTest, NamesWhoIsAtFault) {
  const struct {
    std::string title;
    std::vector<RankReport> reports;
    std::vector<int> at_fault;
    std::string message;
  } rows[] = {
      {"silent, though nobody waits",
       {kBusy, silent_for(3'000), kBusy},
       {1},
       "rank 1 of 3 is stopped or unreachable: no sign of life for 3.00 s"},
      {"the end of the chain",
       {waiting_for({1}, 3'100), waiting_for({2}, 50), waiting_for({3}, 2'000), kBusy},
       {3},
       "rank 3 of 4 did not arrive within 3.10 s; it is alive, but in no call"},
      {"a stopped rank ends the chain, whatever it last waited for",
       {waiting_for({1}, 3'000), silent_for(2'500, waiting_for({2}, 10)), kBusy},
       {1},
       "it is stopped or unreachable"},
      {"all who are missing",
       {waiting_for({1, 3}, 3'000), kBusy, waiting_for({1, 3}, 10), kBusy},
       {1, 3},
       "ranks 1, 3 of 4 did not arrive"},
      {"a ring of waits",
       {waiting_for({1}, 3'000), waiting_for({2}, 3'000), waiting_for({1}, 3'000)},
       {1, 2},
       "in all_reduce of bucket 1"},
      {"whoever waits for nothing, of unknown peers",
       {waiting_for({}, 3'000), waiting_for({}, 2'990), kBusy},
       {2},
       ""},
      {"nobody, where all wait for unknown peers",
       {waiting_for({}, 3'000), waiting_for({}, 3'000)},
       {},
       "no answer within 3.00 s"},
      {"nobody outside the world", {waiting_for({7, -3}, 3'000), kBusy}, {}, ""},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.title);
    const auto world_end = judge(row.reports, kTimeout);
    ASSERT_TRUE(world_end);
    EXPECT_EQ(world_end->failure.kind, FailureKind::kTimeout);
    EXPECT_EQ(world_end->failure.ranks, row.at_fault);
    EXPECT_THAT(world_end->failure.message, HasSubstr(row.message));
    if (row.reports[0].waits.empty()) continue;
    EXPECT_EQ(world_end->operation, "all_reduce");
    EXPECT_EQ(world_end->bucket, 1);
  }
}

RankReport unheard_for(int ms, int parent = 0) {
  RankReport report;
  report.silent = milliseconds(ms);
  report.parent = parent;
  return report;
}

// Rank 2 is stopped. Rank 1, through which it speaks, was last heard 1.1 s ago.
TEST(VerdictTest, ARelayWithAHiccupIsNotNamedForTheStoppedRankBelowIt) {
  const auto end = judge({{}, unheard_for(1'100), unheard_for(30'000, 1)}, milliseconds(30'000));
  ASSERT_TRUE(end);
  EXPECT_THAT(end->failure.ranks, ElementsAre(2)) << end->failure.message;
}

}  // namespace
}  // namespace hsdp::comm
