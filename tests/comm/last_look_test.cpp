// A wait succeeds if what it waits for has come, even if the world ended before the waiter looked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "hsdp/comm/control/control_state.h"
#include "hsdp/comm/control/world_end.h"
#include "hsdp/comm/host/host_wait.h"
#include "hsdp/comm/world.h"
#include "hsdp/error.h"

namespace hsdp::comm {
namespace {

constexpr std::chrono::milliseconds kTimeout{20'000};
const Failure kLost{FailureKind::kPeerLost, "rank 1 of 2 was lost", {1}};

TEST(LastLook, AWaitReturnsWhatCameBeforeTheEnd) {
  const auto controls = in_process_control(2, kTimeout);
  Control& control = *controls[0];
  Bell bell{};
  Waiter waiter(bell);
  // Comes together with the end of the world, just after the waiter looked and before it sleeps.
  bool has_come = false;
  wait_until(
      control, waiter, {.operation = "barrier"},
      [&] {
        if (has_come) return true;
        if (bell.sleepers.load() == 0) return false;
        control.fail(kLost);
        has_come = true;
        return false;
      },
      [] { return 1; });
  EXPECT_THROW(
      wait_until(
          control, waiter, {.operation = "barrier"}, [] { return false; }, [] { return 1; }),
      PeerLostError);
}

TEST(LastLook, AnExchangeBetweenThreadsReturnsWhatCameBeforeTheEnd) {
  const auto controls = in_process_control(2, kTimeout);
  const std::vector<int> both{0, 1};
  for (const auto& control : controls) control->post("word", both, message_to_all("said"));
  controls[0]->fail(kLost);
  for (const auto& control : controls) {
    EXPECT_EQ(control->collect("word", both, {.operation = "status"}).messages(both),
              std::vector<std::string>(2, "said"));
    EXPECT_THROW(static_cast<void>(control->collect("next", both, {.operation = "status"})),
                 PeerLostError);
  }
}

TEST(LastLook, AnExchangeBetweenProcessesReturnsWhatCameBeforeTheEnd) {
  ControlState state;
  state.welcome({});
  const std::vector<int> both{0, 1};
  Agreement said;
  for (const int rank : both) said.add(rank, message_to_all("said"));
  state.deliver("word", said);
  state.deliver_descriptor("memory", 1, {});
  EXPECT_TRUE(state.end({.failure = kLost}));
  const WaitState waiting{.operation = "status"};
  EXPECT_NO_THROW(static_cast<void>(state.await_welcome()));
  EXPECT_EQ(state.take("word", waiting).messages(both), std::vector<std::string>(2, "said"));
  EXPECT_EQ(state.take_descriptors("memory", both, 0, waiting).size(), 2U);
  EXPECT_THROW(static_cast<void>(state.take("word", waiting)), PeerLostError);
}

}  // namespace
}  // namespace hsdp::comm
