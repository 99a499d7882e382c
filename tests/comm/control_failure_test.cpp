// Every way in which a rank can fail its peers, and what the peers report.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "tests/comm/control_outcome.h"

namespace hsdp::comm {
namespace {

// A data loader that keeps open everything its fork inherited. A raw fork runs none of the
// library's handlers.
enum class Child { kNone, kForked, kRawForked };

struct Victim {
  int rank;
  Child child;
};

void start_child(Child kind) {
  if (kind == Child::kNone) return;
  const pid_t pid = kind == Child::kForked ? ::fork() : ::_Fork();
  if (pid != 0) return;
  for (;;) ::pause();
}

class KilledRankTest : public ControlTest, public ::testing::WithParamInterface<Victim> {};

TEST_P(KilledRankTest, IsNamedByAllOthersWithinTwoSeconds) {
  const Victim victim = GetParam();
  ProcessRanks ranks(4, {}, [victim](int rank) {
    const auto control = connect(milliseconds(20'000));
    if (rank == victim.rank) {
      start_child(victim.child);
      note("ready");
      for (;;) ::pause();
    }
    note("ready");
    return outcome_of([&] {
      try {
        static_cast<void>(control->exchange("never", everyone(4), "", {"all_reduce", 3}));
      } catch (const Error& first) {
        const auto again = test::caught<Error>([&] { control->throw_if_failed(); });
        if (again && std::string(again->what()) == first.what()) note("told again");
        throw;
      }
    });
  });
  for (int rank = 0; rank < 4; ++rank) ASSERT_TRUE(ranks.wait_for_note(rank, "ready"));
  ranks.signal(victim.rank, SIGKILL);
  const auto outcomes = ranks.finish();
  const std::vector<int> others = everyone_but(victim.rank, 4);
  expect_failure(outcomes, others, kPeerLost,
                 {"all_reduce of bucket 3: rank " + std::to_string(victim.rank) +
                      " of 4 was lost (its process ended)",
                  "at fault " + std::to_string(victim.rank), "told again"});
}

INSTANTIATE_TEST_SUITE_P(AnyRank, KilledRankTest,
                         ::testing::Values(Victim{0, Child::kNone}, Victim{2, Child::kNone},
                                           Victim{0, Child::kForked}, Victim{1, Child::kForked},
                                           Victim{0, Child::kRawForked},
                                           Victim{3, Child::kRawForked}));

void throw_when_failed(const Control& control) {
  while (!control.failed()) std::this_thread::sleep_for(milliseconds(5));
  control.throw_if_failed();
}

// Waits forever as a collective's data plane does: with a wait slot, and looking for a failure.
void wait_for_peer(Control& control, WaitState state) {
  const int slot = control.begin_wait(state);
  try {
    throw_when_failed(control);
  } catch (...) {
    control.end_wait(slot);
    throw;
  }
}

class StoppedRankTest : public ControlTest, public ::testing::WithParamInterface<int> {};

TEST_P(StoppedRankTest, TimesOutForAllAndForItselfWhenContinued) {
  const int victim = GetParam();
  ProcessRanks ranks(3, {}, [victim](int rank) {
    const auto control = connect();
    note("ready");
    return outcome_of([&] {
      if (rank == victim) throw_when_failed(*control);
      wait_for_peer(*control, {"reduce_scatter", 7, victim});
    });
  });
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(ranks.wait_for_note(rank, "ready"));
  ranks.signal(victim, SIGSTOP);
  const std::string at_fault = "at fault " + std::to_string(victim);
  const std::vector<int> others = everyone_but(victim, 3);
  for (const int rank : others) EXPECT_TRUE(ranks.wait_for_note(rank, at_fault)) << rank;
  ranks.signal(victim, SIGCONT);
  const auto outcomes = ranks.finish();
  expect_failure(
      outcomes, everyone(3), kTimedOut,
      {"rank " + std::to_string(victim) + " of 3", "stopped or unreachable", " s", at_fault});
  expect_failure(outcomes, others, kTimedOut, {"reduce_scatter of bucket 7: "});
  for (const int rank : others) {
    EXPECT_GT(seconds_noted(outcomes[static_cast<std::size_t>(rank)]), 1.5);
  }
}

INSTANTIATE_TEST_SUITE_P(AnyRank, StoppedRankTest, ::testing::Values(0, 1, 2));

// A stop that is noticed but is shorter than the timeout harms no rank.
TEST_F(ControlTest, AShortStopIsForgiven) {
  ProcessRanks ranks(3, {}, [](int) {
    const auto control = connect(milliseconds(60'000));
    for (int round = 0; round < 4; ++round) {
      note("round " + std::to_string(round));
      static_cast<void>(
          control->exchange("round " + std::to_string(round), everyone(3), "", {"test"}));
      std::this_thread::sleep_for(milliseconds(100));
    }
    return control->failed() ? 1 : 0;
  });
  for (const int victim : {0, 1, 2}) {
    ASSERT_TRUE(ranks.wait_for_note(victim, "round " + std::to_string(victim)));
    ranks.signal(victim, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(1'200));
    ranks.signal(victim, SIGCONT);
  }
  expect_all_ok(ranks.finish());
}

TEST_F(ControlTest, WhoDidNotPostIsNamed) {
  const auto outcomes = run_processes(4, {}, [](int rank) {
    const auto control = connect();
    return outcome_of([&] {
      if (rank != 1 && rank != 2) {
        static_cast<void>(control->exchange("status", everyone(4), "", {"status", 5}));
      }
      throw_when_failed(*control);
    });
  });
  expect_failure(
      outcomes, everyone(4), kTimedOut,
      {"status of bucket 5: ranks 1, 2 of 4 did not arrive within 2.", "at fault 1", "at fault 2"});
}

TEST_F(ControlTest, WaitingForARankThatClosedIsALoss) {
  for (const int leaving : {0, 2}) {
    const auto outcomes = run_processes(3, {}, [leaving](int rank) {
      const auto control = connect(milliseconds(30'000));
      if (rank == leaving) return 0;
      return outcome_of([&] {
        if (rank == 1) wait_for_peer(*control, {"all_gather", 0, leaving});
        static_cast<void>(control->exchange("never", everyone(3), "", {"barrier"}));
      });
    });
    EXPECT_TRUE(outcomes[static_cast<std::size_t>(leaving)].ok());
    expect_failure(outcomes, everyone_but(leaving, 3), kPeerLost,
                   {"rank " + std::to_string(leaving) + " of 3 was lost (it closed its world)",
                    "at fault " + std::to_string(leaving)});
    expect_failure(outcomes, {1}, kPeerLost, {"all_gather of bucket 0: "});
    expect_failure(outcomes, {2 - leaving}, kPeerLost, {"barrier: "});
  }
}

TEST_F(ControlTest, TheFirstFailureWinsEverywhereAndWakesCallbacksOnce) {
  const auto outcomes = run_processes(3, {}, [](int rank) {
    const auto control = connect();
    std::atomic<int> calls{0};
    std::atomic<int> dropped_calls{0};
    const auto caller = std::this_thread::get_id();
    std::atomic<bool> from_another_thread{true};
    const auto handle = control->on_failure([&] {
      if (std::this_thread::get_id() == caller) from_another_thread = false;
      ++calls;
    });
    control->on_failure([&] { ++dropped_calls; }).reset();
    bool knows_its_own = true;
    // All of it: a failure may overtake the answer to "begin".
    const int code = outcome_of([&] {
      static_cast<void>(control->exchange("begin", everyone(3), "", {"test"}));
      if (rank == 1) {
        control->fail({FailureKind::kMismatch, "all_reduce: expected 4 elements, got 5", {1}});
        control->fail({FailureKind::kTimeout, "another", {0}});
        knows_its_own = control->failed();
      }
      static_cast<void>(control->exchange("never", everyone(3), "", {"test"}));
    });
    if (!knows_its_own) return 1;
    while (calls == 0) std::this_thread::sleep_for(milliseconds(1));
    std::atomic<int> late_calls{0};
    const auto late = control->on_failure([&] { ++late_calls; });
    while (late_calls == 0) std::this_thread::sleep_for(milliseconds(1));
    return calls == 1 && late_calls == 1 && dropped_calls == 0 && from_another_thread ? code : 2;
  });
  expect_failure(outcomes, everyone(3), kMismatched, {"at fault 1"});
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.notes.front(), "all_reduce: expected 4 elements, got 5");
  }
}

TEST_F(ControlTest, AForkedChildMayNotUseItAndHarmsNobody) {
  expect_all_ok(run_processes(2, {}, [](int) {
    auto control = connect();
    const pid_t child = ::fork();
    if (child == 0) {
      const bool refuses =
          is_refused([&] { control->post("key", everyone(2), {}); }) &&
          is_refused([&] { static_cast<void>(control->collect("key", everyone(2), {"test"})); }) &&
          is_refused([&] { control->throw_if_failed(); }) && is_refused([&] {
            static_cast<void>(control->exchange_descriptors("f", everyone(2), 0));
          });
      control->fail({FailureKind::kAborted, "no", {0}});
      const bool failed = control->failed();
      control.reset();
      ::_exit(refuses && failed ? 0 : 1);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    static_cast<void>(control->exchange("after", everyone(2), "", {"test"}));
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
  }));
}

// Rank 0 saves, says no goodbye and exits, even if a peer is stopped and never reads.
TEST_F(ControlTest, ClosingAfterAFailureNeverHangs) {
  ProcessRanks ranks(3, {}, [](int rank) {
    auto control = connect(milliseconds(30'000));
    note("ready");
    while (rank != 0) ::pause();
    const int code = outcome_of(
        [&] { static_cast<void>(control->exchange("never", everyone(3), "", {"barrier"})); });
    const auto begin = std::chrono::steady_clock::now();
    control.reset();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    return took.count() < 1.5 ? code : 1;
  });
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(ranks.wait_for_note(rank, "ready"));
  ranks.signal(1, SIGSTOP);
  ranks.signal(2, SIGKILL);
  EXPECT_TRUE(ranks.wait_for_note(0, "at fault 2"));
  EXPECT_TRUE(ranks.wait_for_end(0));
  ranks.signal(1, SIGKILL);
  expect_failure(ranks.finish(), {0}, kPeerLost, {"at fault 2"});
}

}  // namespace
}  // namespace hsdp::comm
