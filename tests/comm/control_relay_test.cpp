// A relay by itself: what it passes up, when, and to which ranks it passes what comes back.
#include "hsdp/comm/control/control_relay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/control/world_end.h"
#include "tests/comm/sent_frames.h"

namespace hsdp::comm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

// Rank 1 of 8, on a host with 3, 4, 5 and 6, of which 5 and 6 speak through 3. Rank 0 is elsewhere.
class ControlRelayTest : public testing::Test {
 protected:
  ControlRelayTest()
      : relay_(
            1, 8,
            {[this](FrameType type, const std::string& body) { up_.send(make_frame(type, body)); },
             [this](FrameType type, std::string_view body) {
               own_.send(make_frame(type, body));
             }}) {
    relay_.add(3, three_);
    relay_.add(4, four_);
  }

  [[nodiscard]] static ControlTree tree() {
    return ControlTree({"a", "b", "a", "b", "b", "b", "b", "a"}, 2);
  }
  void enter() { relay_.enter(tree()); }
  void name(int from, const std::vector<int>& members) {
    relay_.handle(from, FrameType::kGroup, GroupFrame{members}.encode());
  }
  void say(int rank, const std::vector<int>& members, bool while_open = false) {
    const PostFrame frame{group_id(members), "key", message_to_all("of " + std::to_string(rank)),
                          while_open};
    relay_.handle(rank, FrameType::kPost, frame.encode());
  }
  // Said by a relay below.
  void say_merged(int from, const std::vector<int>& ranks, const std::vector<int>& members) {
    MergedFrame frame{group_id(members), "key", false, ranks, {}};
    for (const int rank : ranks) frame.agreement.add(rank, message_to_all("hello"));
    relay_.handle(from, FrameType::kMerged, frame.encode());
  }
  // The rank that speaks in the last frame passed up.
  [[nodiscard]] std::vector<int> spoke() const {
    const auto frame = MergedFrame::decode(up_.body(up_.frames.size() - 1));
    return frame ? frame->ranks : std::vector<int>{};
  }
  void answer(const std::vector<int>& members) {
    const AnswerFrame frame{exchange_name("key", group_id(members)), Agreement{}};
    relay_.handle_from_parent(FrameType::kAnswer, frame.encode());
  }

  const std::vector<int> everyone_{0, 1, 2, 3, 4, 5, 6, 7};
  Sent up_;
  Sent own_;
  std::shared_ptr<Sent> three_ = std::make_shared<Sent>();
  std::shared_ptr<Sent> four_ = std::make_shared<Sent>();
  ControlRelay relay_;
};

TEST_F(ControlRelayTest, SpeaksOnceForAllBelowAndAnswersEachLinkOnce) {
  enter();
  for (const int rank : {1, 4, 3}) name(rank, everyone_);
  say(4, everyone_);
  say_merged(3, {3, 5, 6}, everyone_);
  EXPECT_THAT(up_.frames, IsEmpty());
  say(1, everyone_);
  EXPECT_THAT(up_.types(), ElementsAre(FrameType::kGroup, FrameType::kMerged));
  EXPECT_THAT(spoke(), ElementsAre(1, 3, 4, 5, 6));
  answer(everyone_);
  EXPECT_THAT(three_->types(), ElementsAre(FrameType::kAnswer));
  EXPECT_THAT(four_->types(), ElementsAre(FrameType::kAnswer));
  EXPECT_THAT(own_.types(), ElementsAre(FrameType::kAnswer));
}

TEST_F(ControlRelayTest, AnswersAGroupOfItsHostItself) {
  enter();
  const std::vector<int> group{1, 4, 6};
  for (const int rank : {1, 4, 3}) name(rank, group);
  say(1, group);
  say_merged(3, {6}, group);
  say(4, group);
  EXPECT_THAT(up_.frames, IsEmpty());
  ASSERT_THAT(four_->types(), ElementsAre(FrameType::kAnswer));
  EXPECT_THAT(three_->types(), ElementsAre(FrameType::kAnswer));
  EXPECT_THAT(own_.types(), ElementsAre(FrameType::kAnswer));
  const auto answer = AnswerFrame::decode(four_->body(0));
  EXPECT_THAT(answer->agreement->messages(group), ElementsAre("of 1", "of 4", "hello"));
}

// That tells rank 0 which ranks have not come.
TEST_F(ControlRelayTest, PassesOnWhatThereIsWhenSomebodyIsLate) {
  enter();
  const std::vector<int> group{1, 4, 6};
  name(1, group);
  say(1, group);
  say(4, group);
  relay_.tick(true);
  EXPECT_THAT(up_.frames, IsEmpty());
  relay_.tick(true);
  EXPECT_THAT(spoke(), ElementsAre(1, 4));
  say_merged(3, {6}, group);  // the last one: rank 0 answers, as it knows of the others
  EXPECT_THAT(spoke(), ElementsAre(6));
  EXPECT_THAT(own_.frames, IsEmpty());
  answer(group);
  EXPECT_THAT(own_.types(), ElementsAre(FrameType::kAnswer));
  EXPECT_THAT(four_->types(), testing::Contains(FrameType::kAnswer));
}

// Otherwise rank 0 would think that the rank left silently.
TEST_F(ControlRelayTest, PassesOnWhatARankHasSaidBeforeItsGoodbye) {
  enter();
  for (const int rank : {3, 4}) {
    name(rank, everyone_);
    say(rank, everyone_);
  }
  relay_.handle(4, FrameType::kGoodbye, {});
  EXPECT_THAT(up_.types(), ElementsAre(FrameType::kGroup, FrameType::kMerged, FrameType::kRelayed));
}

// Ranks would wait in vain for a member that has closed its world.
TEST_F(ControlRelayTest, PassesOnAtOnceWhatIsSaidWhileOpen) {
  enter();
  name(4, everyone_);
  say(4, everyone_, true);
  EXPECT_THAT(spoke(), ElementsAre(4));
}

TEST_F(ControlRelayTest, KeepsWhatIsSaidUntilItEntersTheTree) {
  name(4, everyone_);
  say(4, everyone_);
  relay_.tick(true);
  relay_.tick(true);
  EXPECT_THAT(up_.frames, IsEmpty());
  enter();
  name(3, everyone_);
  say(1, everyone_);
  say_merged(3, {3, 5, 6}, everyone_);
  EXPECT_THAT(spoke(), ElementsAre(1, 3, 4, 5, 6));
}

// Rank 4 has connected too late and speaks to rank 0 directly.
TEST_F(ControlRelayTest, LetsGoOfAChildThatIsNotInTheTree) {
  ControlTree without_four = tree();
  without_four.cut(4);
  relay_.enter(without_four);
  EXPECT_FALSE(four_->is_open);
  relay_.child_ended(4);
  EXPECT_THAT(up_.frames, IsEmpty());
  EXPECT_FALSE(relay_.all_closed());  // rank 3 is still there
}

TEST_F(ControlRelayTest, TellsThoseBelowItselfAndOthersThroughItsParent) {
  enter();
  const auto tell = [&](int from, int to) {
    relay_.handle(from, FrameType::kTell, TellFrame{to, "topic", "hello"}.encode());
  };
  tell(4, 1);
  EXPECT_EQ(TellFrame::decode(own_.body(0))->peer, 4);
  tell(1, 4);
  EXPECT_EQ(TellFrame::decode(four_->body(0))->peer, 1);
  tell(4, 6);  // through rank 3
  const auto relayed = RelayedFrame::decode(three_->body(0));
  EXPECT_EQ(relayed->rank, 6);
  EXPECT_EQ(TellFrame::decode(relayed->body)->peer, 4);
  tell(4, 7);
  EXPECT_EQ(RelayedFrame::decode(up_.body(0))->rank, 4);
  relay_.handle_from_parent(FrameType::kRelayed, relayed->encode());
  EXPECT_THAT(three_->frames, SizeIs(2));
}

TEST_F(ControlRelayTest, SaysWhoseProcessHasEndedUnlessAllBelowHaveLeft) {
  enter();
  relay_.handle(4, FrameType::kGoodbye, {});
  EXPECT_TRUE(four_->is_finished);
  relay_.child_ended(4);
  EXPECT_THAT(up_.types(), ElementsAre(FrameType::kRelayed));  // the goodbye
  relay_.handle(3, FrameType::kGoodbye, {});
  EXPECT_FALSE(three_->is_finished);  // 5 and 6 are still there
  EXPECT_FALSE(relay_.all_closed());
  relay_.child_ended(3);
  EXPECT_EQ(up_.types().back(), FrameType::kProcessEnd);
  EXPECT_EQ(rank_in(up_.body(2)), 3);
  EXPECT_TRUE(relay_.all_closed());
}

TEST_F(ControlRelayTest, TellsTheEndOfTheWorldOnceAndTakesNothingMore) {
  enter();
  relay_.end(end_by_mismatch(2, "first"));
  relay_.handle_from_parent(FrameType::kFail, end_by_mismatch(0, "second").encode());
  EXPECT_THAT(four_->types(), ElementsAre(FrameType::kFail));
  EXPECT_EQ(WorldEnd::decode(four_->body(0))->failure.message, "first");
  name(4, everyone_);
  say(4, everyone_);
  EXPECT_THAT(up_.frames, IsEmpty());
}

TEST_F(ControlRelayTest, TakesNothingThatCannotBe) {
  enter();
  const auto last_end = [&] {
    const auto end = WorldEnd::decode(up_.body(up_.frames.size() - 1));
    return end ? end->failure.message : "";
  };
  say(4, everyone_);
  EXPECT_THAT(last_end(), HasSubstr("malformed exchange from rank 4"));
  name(4, {4, 8});
  EXPECT_THAT(last_end(), HasSubstr("malformed group from rank 4"));
  name(4, {3, 4});
  say(4, {3, 4});
  say(4, {3, 4});
  EXPECT_THAT(last_end(), HasSubstr("rank 4 used the key 'key' twice"));
  relay_.handle(4, FrameType::kWelcome, {});
  EXPECT_THAT(last_end(), HasSubstr("malformed message from rank 4"));
}

// Rank 0 has closed the child's direct link, as the child said that it speaks through this rank.
TEST(ControlRelayEntryTest, AChildThatEndsBeforeItsParentEntersTheTreeIsReported) {
  Sent up;
  ControlRelay relay(
      1, 4,
      {[&](FrameType type, const std::string& body) { up.send(make_frame(type, body)); },
       [](FrameType, std::string_view) {}});
  const auto two = std::make_shared<Sent>();
  const auto three = std::make_shared<Sent>();
  relay.add(2, two);
  relay.add(3, three);
  relay.child_ended(2);
  relay.enter(ControlTree({"a", "b", "b", "b"}, 2));
  ASSERT_THAT(up.types(), ElementsAre(FrameType::kProcessEnd));
  EXPECT_EQ(rank_in(up.body(0)), 2);
}

}  // namespace
}  // namespace hsdp::comm
