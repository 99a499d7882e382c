// The links of a rank that moves into the tree, over real sockets.
#include "hsdp/comm/control/control_loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "hsdp/comm/control/world_end.h"

namespace hsdp::comm {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;

struct Pair {
  UniqueFd near;
  UniqueFd far;
};

Pair connected() {
  std::array<int, 2> ends{};
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends.data()), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

void write_frame(const UniqueFd& to, FrameType type, const std::string& body) {
  const FrameBytes frame = make_frame(type, body);
  EXPECT_EQ(::send(to.get(), frame->data(), frame->size(), MSG_NOSIGNAL), std::ssize(*frame));
}

// Rank 0 dies when rank 2 is about to enter the tree. The parent learns of it first and says so.
TEST(ControlLoopTest, AnEndThatTheParentTellsBeforeTheTreeIsEnteredIsHeard) {
  const auto state = std::make_shared<ControlState>();
  Pair hub = connected();
  Pair parent = connected();
  ControlLoop loop(state, {.rank = 2, .size = 4}, milliseconds(20'000));
  loop.start_as_rank(std::move(hub.near));
  write_frame(parent.far, FrameType::kBeat, BeatFrame{}.encode());
  ASSERT_TRUE(loop.follow_parent(std::move(parent.near), 1,
                                 std::chrono::steady_clock::now() + milliseconds(5'000)));
  write_frame(parent.far, FrameType::kFail, end_by_loss(0, 4, "end of file").encode());
  std::this_thread::sleep_for(milliseconds(100));  // the frame has been read
  loop.enter_tree(ControlTree({"a", "b", "b", "b"}, 2));
  std::this_thread::sleep_for(milliseconds(100));
  hub.far.reset();  // tells nothing: rank 0 may only have heard of the move
  const auto end = std::chrono::steady_clock::now() + milliseconds(2'000);
  while (!state->failed() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_TRUE(state->failed()) << "within 2 s";
  parent.far.reset();  // the parent's process raises an error and exits
  for (int i = 0; i < 200 && !state->failed(); ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  ASSERT_TRUE(state->failed());
  EXPECT_THAT(state->how_it_ended()->failure.ranks, ElementsAre(0));
}

// The parent does not accept the rank, as if it had reached its limit of open files, and meanwhile
// the world ends.
TEST(ControlLoopTest, WhoeverWaitsForItsParentHearsThatTheWorldHasEnded) {
  const auto state = std::make_shared<ControlState>();
  Pair hub = connected();
  Pair parent = connected();
  ControlLoop loop(state, {.rank = 2, .size = 4}, milliseconds(20'000));
  loop.start_as_rank(std::move(hub.near));
  write_frame(hub.far, FrameType::kFail, end_by_loss(3, 4, "end of file").encode());
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(loop.follow_parent(std::move(parent.near), 1, begin + milliseconds(5'000)));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(2'000));
}

TEST(ControlLoopTest, WhoeverWaitsForItsParentSaysSoInItsBeats) {
  const auto state = std::make_shared<ControlState>();
  Pair hub = connected();
  Pair parent = connected();
  ControlLoop loop(state, {.rank = 2, .size = 4}, milliseconds(20'000));
  loop.start_as_rank(std::move(hub.near));
  std::thread follower([&] {
    static_cast<void>(loop.follow_parent(std::move(parent.near), 1,
                                         std::chrono::steady_clock::now() + milliseconds(500)));
  });
  std::this_thread::sleep_for(milliseconds(200));
  const auto waits = state->active_waits();
  follower.join();
  ASSERT_EQ(waits.size(), 1U);
  EXPECT_EQ(waits[0].peer, 1);
}

// Rank 0 closes a relay's link once all ranks below it have said goodbye: rank 0 is not lost.
TEST(ControlLoopTest, ARelayThatLeavesInOrderDoesNotEndInALoss) {
  const auto state = std::make_shared<ControlState>();
  Pair hub = connected();
  Pair door = connected();  // nothing connects
  ::listen(door.near.get(), 1);
  ControlLoop loop(state, {.rank = 1, .size = 4}, milliseconds(20'000));
  loop.start_as_rank(std::move(hub.near));
  loop.lead_children(std::move(door.near), {2, 3});
  ControlTree tree({"a", "b", "b", "b"}, 2);
  tree.cut(2);
  tree.cut(3);
  loop.enter_tree(tree);
  std::thread hub_thread([&] {
    std::this_thread::sleep_for(milliseconds(100));
    hub.far.reset();
  });
  bool woken = false;
  const auto handle = state->on_failure([&] { woken = true; });
  loop.stop();
  hub_thread.join();
  EXPECT_FALSE(woken);
  EXPECT_FALSE(state->failed());
}

}  // namespace
}  // namespace hsdp::comm
