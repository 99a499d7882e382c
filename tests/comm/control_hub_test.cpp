// Rank 0's relay by itself: what it answers, and what it accepts from no rank.
#include "hsdp/comm/control/control_hub.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "tests/comm/sent_frames.h"

namespace hsdp::comm {
namespace {

using std::chrono::milliseconds;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

class ControlHubTest : public testing::Test {
 protected:
  static constexpr int kSize = 3;

  ControlHubTest()
      : hub_(clock_, {{.size = kSize}, "", std::chrono::seconds(20), [] { return std::string(); }},
             [this](FrameType type, std::string_view body) { own_.send(make_frame(type, body)); }) {
    for (int rank = 1; rank < kSize; ++rank) {
      links_.push_back(std::make_shared<Sent>());
      hub_.join(links_.back(), {.rank = rank, .size = kSize});
    }
    own_.frames.clear();  // the welcome
    for (const auto& link : links_) link->frames.clear();
  }

  void name(int rank, const std::vector<int>& members) {
    hub_.handle(rank, FrameType::kGroup, GroupFrame{members}.encode());
  }
  void say(int rank, const std::vector<int>& members, const std::string& text) {
    const PostFrame frame{group_id(members), "key", message_to_all(text)};
    hub_.handle(rank, FrameType::kPost, frame.encode());
  }
  // Why the world ended, as this rank was told.
  [[nodiscard]] static WorldEnd end_in(const Sent& sent) {
    if (sent.frames.size() != 1 || type_of(*sent.frames[0]) != FrameType::kFail) return {};
    return WorldEnd::decode(std::string_view(*sent.frames[0]).substr(kFrameHeaderBytes)).value();
  }
  void expect_end_by(int rank, const std::string& text) {
    for (const Sent* const sent : {&own_, links_[0].get(), links_[1].get()}) {
      const WorldEnd end = end_in(*sent);
      EXPECT_EQ(end.failure.kind, FailureKind::kMismatch);
      EXPECT_THAT(end.failure.ranks, ElementsAre(rank));
      EXPECT_THAT(end.failure.message, HasSubstr(text));
    }
  }

  OwnClock clock_{OwnClock::steady_ms, nullptr};
  Sent own_;
  std::vector<std::shared_ptr<Sent>> links_;
  ControlHub hub_;
};

TEST_F(ControlHubTest, AnswersTheMembersOnce) {
  const std::vector<int> pair{0, 2};
  for (const int rank : {0, 2, 2}) name(rank, pair);
  say(2, pair, "two");
  EXPECT_THAT(own_.frames, SizeIs(0));
  say(0, pair, "none");
  EXPECT_THAT(links_[0]->frames, SizeIs(0)) << "rank 1 is no member";
  for (const Sent* const sent : {&own_, links_[1].get()}) {
    ASSERT_THAT(sent->frames, SizeIs(1));
    ASSERT_EQ(type_of(*sent->frames[0]), FrameType::kAnswer);
    const auto answer =
        AnswerFrame::decode(std::string_view(*sent->frames[0]).substr(kFrameHeaderBytes));
    ASSERT_TRUE(answer && answer->agreement);
    EXPECT_THAT(answer->agreement->messages(pair), ElementsAre("none", "two"));
  }
}

TEST_F(ControlHubTest, TakesNoWordInAGroupThatNobodyNamed) {
  say(1, {0, 1}, "hello");
  expect_end_by(1, "malformed exchange from rank 1");
}

TEST_F(ControlHubTest, TakesNoWordOfOneWhoIsNoMember) {
  name(2, {0, 2});
  say(1, {0, 2}, "hello");
  expect_end_by(1, "malformed exchange from rank 1");
}

TEST_F(ControlHubTest, TakesNoGroupThatCannotBe) {
  name(2, {1, 2, 3});  // there is no rank 3
  expect_end_by(2, "malformed group from rank 2");
}

TEST_F(ControlHubTest, TakesOneWordOfEachRank) {
  name(1, {0, 1});
  say(1, {0, 1}, "hello");
  say(1, {0, 1}, "again");
  expect_end_by(1, "rank 1 used the key 'key' twice");
}

// Rank 0 of 3, where 2 speaks through 1.
class ControlHubBelowTest : public testing::Test {
 protected:
  ControlHubBelowTest()
      : hub_(clock_, {{.size = 3}, "", std::chrono::seconds(20), [] { return std::string(); }},
             [this](FrameType type, std::string_view body) { own_.send(make_frame(type, body)); }) {
    hub_.join(one_, {.rank = 1, .size = 3});
    hub_.join(two_, {.rank = 2, .size = 3});
    own_.frames.clear();
    one_->frames.clear();
    two_->frames.clear();
  }
  void move() { hub_.handle(2, FrameType::kMoved, rank_body(1)); }
  void say(int rank, const std::vector<int>& members) {
    hub_.handle(rank, FrameType::kGroup, GroupFrame{members}.encode());
    hub_.handle(rank, FrameType::kPost,
                PostFrame{group_id(members), "key", message_to_all("x")}.encode());
  }
  [[nodiscard]] static BeatFrame waits_in(const std::vector<int>& members) {
    BeatFrame beat;
    beat.waits.push_back({.id = 1,
                          .operation = "status",
                          .exchange = exchange_hash(exchange_name("key", group_id(members))),
                          .age = milliseconds(10)});
    return beat;
  }

  OwnClock clock_{OwnClock::steady_ms, nullptr};
  Sent own_;
  std::shared_ptr<Sent> one_ = std::make_shared<Sent>();
  std::shared_ptr<Sent> two_ = std::make_shared<Sent>();
  ControlHub hub_;
};

// Rank 1 has closed its world and its process has ended. Rank 2, which spoke through it, is alive.
TEST_F(ControlHubBelowTest, NamesTheRelayThatLeftAndNotTheLivingRankBelowIt) {
  move();
  say(0, {0, 2});
  hub_.handle(1, FrameType::kGoodbye, {});
  hub_.link_broke(1, "end of file");
  hub_.handle(0, FrameType::kBeat, waits_in({0, 2}).encode());
  hub_.tick();
  ASSERT_THAT(own_.types(), Contains(FrameType::kFail));
  const auto end = WorldEnd::decode(own_.body(own_.frames.size() - 1));
  ASSERT_TRUE(end);
  EXPECT_THAT(end->failure.ranks, ElementsAre(1)) << end->failure.message;
}

// A relay sends the beats it has collected with its next tick, after the goodbye.
TEST_F(ControlHubBelowTest, ABeatThatComesAfterTheGoodbyeOfItsRankIsNoWait) {
  move();
  const std::vector<int> pair{1, 2};
  say(2, pair);
  hub_.handle(1, FrameType::kRelayed, RelayedFrame{2, FrameType::kGoodbye, {}}.encode());
  BeatsFrame held;
  held.beats.emplace_back(2, waits_in(pair));
  hub_.handle(1, FrameType::kBeats, held.encode());
  hub_.handle(1, FrameType::kGoodbye, {});
  hub_.tick();
  EXPECT_THAT(own_.types(), Not(Contains(FrameType::kFail))) << "nobody waits any more";
}

// Everything queued there reaches the rank: the old link is flushed, not cut.
TEST_F(ControlHubBelowTest, WhatIsQueuedOnTheOldLinkOfARankThatMovesStillGoes) {
  hub_.handle(0, FrameType::kTell, TellFrame{2, "topic", std::string(1U << 20U, 'x')}.encode());
  ASSERT_THAT(two_->types(), Contains(FrameType::kTell));
  move();
  EXPECT_TRUE(two_->is_finished);
  EXPECT_TRUE(two_->is_open);
}

}  // namespace
}  // namespace hsdp::comm
