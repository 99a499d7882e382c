// How the ranks of one host find each other, and what they do when some do not come.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/rendezvous/job_directory.h"
#include "tests/comm/control_outcome.h"

namespace hsdp::comm {
namespace {

class RendezvousTest : public ControlTest {};

// What the launcher tells a rank of this host.
void be(int rank, int size) {
  for (const std::string of : {"", "LOCAL_"}) {
    ::setenv((of + "RANK").c_str(), std::to_string(rank).c_str(), 1);
    ::setenv((of + "WORLD_SIZE").c_str(), std::to_string(size).c_str(), 1);
  }
}

TEST_F(RendezvousTest, MissingRanksAreNamed) {
  const auto outcomes = run_processes(
      4, {}, [](int rank) { return rank % 2 == 1 ? 0 : try_to_connect(milliseconds(700)); });
  expect_failure(outcomes, {0, 2}, kTimedOut,
                 {"rendezvous: ranks 1, 3 of 4 did not join within 0.70 s; check that all ranks "
                  "were started and still run\"",
                  "at fault 1", "at fault 3"});
}

TEST_F(RendezvousTest, AMissingRankZeroIsNamed) {
  const auto outcomes = run_processes(
      2, {}, [](int rank) { return rank == 0 ? 0 : try_to_connect(milliseconds(500)); });
  expect_failure(outcomes, {1}, kTimedOut,
                 {"rendezvous: rank 0 of 2 did not answer", "at fault 0"});
}

TEST_F(RendezvousTest, ARankKilledAfterItJoinedIsNamedByAll) {
  for (const int victim : {0, 1}) {
    SCOPED_TRACE(victim);
    expect_a_joined_rank_named_when_killed({}, victim);
  }
}

TEST_F(RendezvousTest, ASocketIsSweptWhenItsHolderIsDead) {
  LaunchEnvironment launch;
  launch.job = "swept";
  const auto path = job_socket_path(launch, "rank0");
  ProcessRanks ranks(1, {}, [&path](int) {
    const auto held = JobSocket::claim(path, SOCK_STREAM);
    note("holding");
    for (;;) ::pause();
    return 0;
  });
  ASSERT_TRUE(ranks.wait_for_note(0, "holding"));
  EXPECT_FALSE(sweep_job_socket(path));
  EXPECT_TRUE(std::filesystem::exists(path));
  ranks.signal(0, SIGKILL);
  static_cast<void>(ranks.finish());
  EXPECT_TRUE(sweep_job_socket(path));
  EXPECT_FALSE(std::filesystem::exists(path.parent_path()));
  EXPECT_TRUE(sweep_job_socket(path)) << "nothing there";
}

TEST_F(RendezvousTest, WhoComesALittleLateIsToldOfTheLoss) {
  ProcessRanks ranks(3, {}, [](int rank) {
    if (rank == 2) {
      note("waiting");
      ::raise(SIGSTOP);
    }
    note("connecting");
    return try_to_connect(milliseconds(20'000));
  });
  ASSERT_TRUE(ranks.wait_for_note(2, "waiting"));
  ASSERT_TRUE(wait_until_connected(ranks, {1, 0}));
  ranks.signal(1, SIGKILL);
  ranks.signal(2, SIGCONT);
  expect_failure(ranks.finish(), {0, 2}, kPeerLost, {"at fault 1"});
}

TEST_F(RendezvousTest, WhatADeadRankZeroLeftIsReplaced) {
  const ProcessOptions options{.environment = {{"HSDP_JOB", "same name"}}};
  ProcessRanks dead(1, options, [](int) {
    be(0, 2);
    static_cast<void>(connect(milliseconds(20'000)));
    return 1;
  });
  while (runtime_.leftovers().size() < 2) std::this_thread::sleep_for(milliseconds(1));
  dead.signal(0, SIGKILL);
  static_cast<void>(dead.finish());
  EXPECT_EQ(runtime_.leftovers().size(), 2U);  // no rank is left to remove it
  expect_all_ok(run_processes(2, options, [](int) { return connect()->size() == 2 ? 0 : 1; }));
}

TEST_F(RendezvousTest, DirectoriesOfOthersAreRefused) {
  LaunchEnvironment launch;
  launch.job = "hostile";
  const auto directory = job_socket_path(launch, "rank0").parent_path();
  const auto expect_refused = [&] {
    const auto outcomes = run_processes(2, {.environment = {{"HSDP_JOB", "hostile"}}},
                                        [](int) { return connect() ? 0 : 1; });
    for (const auto& outcome : outcomes) {
      EXPECT_THAT(outcome.error, AllOf(HasSubstr(directory.string()), HasSubstr("0700")));
      EXPECT_LT(outcome.seconds, kHangSeconds);
    }
    std::filesystem::remove_all(directory);
  };
  std::filesystem::create_directory(directory);
  ::chmod(directory.c_str(), 0777);
  expect_refused();
  std::filesystem::create_directory(runtime_.path() / "elsewhere");
  ::chmod((runtime_.path() / "elsewhere").c_str(), 0700);
  std::filesystem::create_directory_symlink(runtime_.path() / "elsewhere", directory);
  expect_refused();
  std::filesystem::remove_all(runtime_.path() / "elsewhere");
  if (::geteuid() == 0) {
    std::filesystem::create_directory(directory);
    ::chmod(directory.c_str(), 0700);
    ASSERT_EQ(::chown(directory.c_str(), 1, 1), 0);
    expect_refused();
  }
}

TEST_F(RendezvousTest, ASecondProcessOfARankIsRefusedAlone) {
  ProcessRanks ranks(4, {}, [](int rank) {
    // Processes 0, 1, 2 are the world; process 3 says that it is rank 1 too.
    be(rank == 3 ? 1 : rank, 3);
    if (rank == 2) ::raise(SIGSTOP);  // the door stays open
    return outcome_of([] {
      const auto control = connect(milliseconds(20'000));
      static_cast<void>(control->exchange("all", everyone(3), "", {"test"}));
      static_cast<void>(control->exchange("all done", everyone(3), "", {"test"}));
    });
  });
  ASSERT_TRUE(ranks.wait_until_stopped(2));
  ASSERT_TRUE(ranks.wait_for_end_of_one({1, 3}));
  ranks.signal(2, SIGCONT);
  const auto outcomes = ranks.finish();
  EXPECT_TRUE(outcomes[0].ok()) << outcomes[0].error;
  EXPECT_TRUE(outcomes[2].ok()) << outcomes[2].error;
  EXPECT_NE(outcomes[1].ok(), outcomes[3].ok());
  expect_failure(outcomes, {outcomes[1].ok() ? 3 : 1}, kMismatched,
                 {"expected one process as rank 1 of 3, got a second"});
}

TEST_F(RendezvousTest, RanksThatDisagreeAboutTheSizeAreNamed) {
  const auto outcomes = run_processes(3, {}, [](int rank) {
    be(rank, rank == 2 ? 4 : 3);
    return try_to_connect();
  });
  expect_failure(outcomes, everyone(3), kMismatched,
                 {"world size: expected 3 on every rank, got 4 on rank 2", "at fault 2"});
}

TEST_F(RendezvousTest, RestartsOfAJobDoNotMix) {
  expect_all_ok(run_processes(4, {}, [](int rank) {
    be(rank % 2, 2);
    ::setenv("TORCHELASTIC_RESTART_COUNT", std::to_string(rank / 2).c_str(), 1);
    const auto control = connect();
    const std::string own = std::to_string(rank / 2);
    const auto all = control->exchange("restart", everyone(2), own, {"test"});
    return all[0] == own && all[1] == own ? 0 : 1;
  }));
}

}  // namespace
}  // namespace hsdp::comm
