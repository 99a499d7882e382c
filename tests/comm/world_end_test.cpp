// Who is at fault, as a table of what the ranks reported.
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
  BeatWait wait;
  wait.id = 2;
  wait.operation = "all_reduce";
  wait.bucket = 1;
  wait.age = milliseconds(age_ms);
  report.waits.push_back(wait);
  report.awaited.push_back(std::move(awaited));
  return report;
}

RankReport busy() { return {}; }

RankReport silent_for(int ms) {
  RankReport report;
  report.silent = milliseconds(ms);
  return report;
}

TEST(VerdictTest, NobodyIsAtFaultBeforeTheTimeout) {
  EXPECT_FALSE(judge({busy(), busy()}, kTimeout));
  EXPECT_FALSE(judge({waiting_for({1}, 2'999), silent_for(2'999)}, kTimeout));
}

TEST(VerdictTest, ASilentRankIsAtFaultThoughNobodyWaits) {
  const auto world_end = judge({busy(), silent_for(3'000), busy()}, kTimeout);
  ASSERT_TRUE(world_end);
  EXPECT_EQ(world_end->failure.kind, FailureKind::kTimeout);
  EXPECT_THAT(world_end->failure.ranks, ElementsAre(1));
  EXPECT_THAT(world_end->failure.message,
              HasSubstr("rank 1 of 3 is stopped or unreachable: no sign of life for 3.00 s"));
}

TEST(VerdictTest, ARankThatSaidGoodbyeMayBeSilent) {
  RankReport closed = silent_for(60'000);
  closed.closed = true;
  EXPECT_FALSE(judge({busy(), closed}, kTimeout));
}

TEST(VerdictTest, TheEndOfTheChainIsAtFault) {
  const auto world_end = judge(
      {waiting_for({1}, 3'100), waiting_for({2}, 50), waiting_for({3}, 2'000), busy()}, kTimeout);
  ASSERT_TRUE(world_end);
  EXPECT_THAT(world_end->failure.ranks, ElementsAre(3));
  EXPECT_EQ(world_end->operation, "all_reduce");
  EXPECT_EQ(world_end->bucket, 1);
  EXPECT_THAT(world_end->failure.message,
              HasSubstr("rank 3 of 4 did not arrive within 3.10 s; it is alive, but in no call"));
}

TEST(VerdictTest, AStoppedRankEndsTheChainWhateverItLastWaitedFor) {
  RankReport stopped = waiting_for({2}, 10);
  stopped.silent = milliseconds(2'500);
  const auto world_end = judge({waiting_for({1}, 3'000), stopped, busy()}, kTimeout);
  ASSERT_TRUE(world_end);
  EXPECT_THAT(world_end->failure.ranks, ElementsAre(1));
  EXPECT_THAT(world_end->failure.message, HasSubstr("it is stopped or unreachable"));
}

TEST(VerdictTest, AllWhoAreMissingAreNamed) {
  const auto world_end =
      judge({waiting_for({1, 3}, 3'000), busy(), waiting_for({1, 3}, 10), busy()}, kTimeout);
  ASSERT_TRUE(world_end);
  EXPECT_THAT(world_end->failure.ranks, ElementsAre(1, 3));
  EXPECT_THAT(world_end->failure.message, HasSubstr("ranks 1, 3 of 4 did not arrive"));
}

TEST(VerdictTest, ARingOfWaitsNamesTheRing) {
  const auto world_end =
      judge({waiting_for({1}, 3'000), waiting_for({2}, 3'000), waiting_for({1}, 3'000)}, kTimeout);
  ASSERT_TRUE(world_end);
  EXPECT_THAT(world_end->failure.ranks, ElementsAre(1, 2));
  EXPECT_THAT(world_end->failure.message, HasSubstr("in all_reduce of bucket 1"));
}

TEST(VerdictTest, AnUnknownPeerIsWhoeverWaitsForNothing) {
  const auto world_end = judge({waiting_for({}, 3'000), waiting_for({}, 2'990), busy()}, kTimeout);
  ASSERT_TRUE(world_end);
  EXPECT_THAT(world_end->failure.ranks, ElementsAre(2));
}

TEST(VerdictTest, AllWaitingForUnknownPeersIsStillAVerdict) {
  const auto world_end = judge({waiting_for({}, 3'000), waiting_for({}, 3'000)}, kTimeout);
  ASSERT_TRUE(world_end);
  EXPECT_THAT(world_end->failure.ranks, ::testing::IsEmpty());
  EXPECT_THAT(world_end->failure.message, HasSubstr("no answer within 3.00 s"));
}

TEST(VerdictTest, RanksOutsideTheWorldAreIgnored) {
  const auto world_end = judge({waiting_for({7, -3}, 3'000), busy()}, kTimeout);
  ASSERT_TRUE(world_end);
  EXPECT_THAT(world_end->failure.ranks, ::testing::IsEmpty());
}

}  // namespace
}  // namespace hsdp::comm
