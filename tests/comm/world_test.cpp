// connect_world: the choice of engine, and one set of connections for each process.
#include "hsdp/comm/world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "tests/comm/control_outcome.h"

namespace hsdp {
namespace {

using comm::ControlTest;
using comm::expect_all_ok;
using test::run_processes;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string usage_error_of(const WorldOptions& options) {
  try {
    static_cast<void>(connect_world(options));
    return "no error";
  } catch (const UsageError& error) {
    return error.what();
  }
}

TEST(WorldTest, WhatCannotServeIsNamed) {
  struct Row {
    WorldOptions options;
    std::vector<std::string> named;
  };
  const Device gpu{DeviceType::kCuda};
  std::vector<Row> rows{
      {{.engine = "host", .device = gpu}, {"cuda:0", "nccl"}},
      {{.engine = "gloo"}, {"auto, host, nccl, mpi, got 'gloo'"}},
      {{.timeout = std::chrono::milliseconds::max()},
       {"expected 0.001 to 1000000 seconds, got 9.2"}},
      {{.timeout = std::chrono::milliseconds(-1)}, {"seconds, got -0.001"}},
  };
  const std::string absent = HSDP_ABSENT_ENGINES;  // not in this build
  if (absent.find("mpi") != std::string::npos) {
    rows.push_back({{.engine = "mpi"}, {"-DHSDP_MPI=ON"}});
  }
  if (absent.find("nccl") != std::string::npos) {
    rows.push_back({{.engine = "nccl"}, {"-DHSDP_NCCL=ON"}});
    rows.push_back({{.engine = "auto", .device = gpu}, {"-DHSDP_NCCL=ON"}});
  }
  for (const Row& row : rows) {
    SCOPED_TRACE(row.named[0]);
    for (const std::string& text : row.named) {
      EXPECT_THAT(usage_error_of(row.options), HasSubstr(text));
    }
  }
}

TEST(WorldTest, AWrongTransportIsNamed) {
  ::setenv("HSDP_TRANSPORT", "pigeon", 1);
  EXPECT_THAT(usage_error_of({}), AllOf(HasSubstr("HSDP_TRANSPORT"), HasSubstr("pigeon")));
  ::unsetenv("HSDP_TRANSPORT");
}

// Checks the sums of 1 + 2 + ... over the ranks.
bool adds_up(Communicator& world) {
  std::array<float, 5> data{};
  data.fill(static_cast<float>(world.rank() + 1));
  world.all_reduce(TensorView{data.data(), std::ssize(data)});
  const auto expected = static_cast<float>(world.size() * (world.size() + 1) / 2);
  return std::ranges::count(data, expected) == std::ssize(data);
}

TEST_F(ControlTest, ASecondCallSharesTheConnections) {
  expect_all_ok(run_processes(3, {}, [](int) {
    for (int round = 0; round < 2; ++round) {  // and all ranks can begin anew
      std::optional<Communicator> first = connect_world();
      Communicator second = connect_world();
      if (first->engine() != second.engine()) return 1;
      if (!adds_up(*first)) return 2;
      first.reset();
      if (!adds_up(second)) return 3;
    }
    return 0;
  }));
}

TEST_F(ControlTest, ACallThatContradictsTheFirstIsAnError) {
  const auto outcomes = run_processes(2, {}, [](int rank) {
    const Communicator world = connect_world();
    WorldOptions other;
    other.launch = comm::detect_launch();
    other.launch->rank = 1 - rank;
    test::note(usage_error_of(other));
    return 0;
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
    EXPECT_THAT(outcome.notes,
                ::testing::Contains(HasSubstr("as in the world that this process has open")));
  }
}

// A garbage collector frees a world at another time on every rank.
TEST_F(ControlTest, RanksAgreeWhenSomeStillHoldTheFirstWorld) {
  for (const auto& [holder, of_part] :
       {std::pair(0, false), std::pair(2, false), std::pair(0, true), std::pair(2, true)}) {
    expect_all_ok(run_processes(3, {}, [holder = holder, of_part = of_part](int rank) {
      std::optional<Communicator> first = connect_world();
      // The connections still exist and only the group of all ranks is gone.
      std::optional<Communicator> part;
      if (of_part) part = first->split(0, rank);
      if (rank != holder) first.reset();
      for (int round = 0; round < 2; ++round) {  // the second one is shared
        Communicator second = connect_world();
        if (!adds_up(second)) return 1;
        const Communicator third = connect_world();
        if (third.engine() != second.engine()) return 2;
      }
      return !part || adds_up(*part) ? 0 : 3;
    }));
  }
}

// Ranks can still use the old world with each other when another of its ranks connects anew.
TEST_F(ControlTest, AnOldWorldGoesOnBesideTheNextOne) {
  expect_all_ok(run_processes(3, {}, [](int rank) {
    std::optional<Communicator> first = connect_world();
    Communicator pair = first->split(rank == 2 ? 1 : 0, rank);
    first.reset();
    if (rank == 2) pair = {};
    Communicator second = connect_world();
    if (!adds_up(second)) return 1;
    return rank == 2 || adds_up(pair) ? 0 : 2;
  }));
}

TEST_F(ControlTest, AFailedWorldIsLeftBehindWhoeverHoldsIt) {
  expect_all_ok(run_processes(3, {}, [](int rank) {
    Communicator failed = connect_world();
    if (rank == 1) failed.abort("the disk is full");
    const auto is_told = [&failed] {
      const auto error = test::caught<RankError>([&failed] {
        for (;;) failed.barrier();
      });
      return std::string(error->what()).find("the disk is full") != std::string::npos;
    };
    if (!is_told()) return 1;
    Communicator next = connect_world();
    if (!adds_up(next)) return 2;
    return is_told() ? 0 : 3;
  }));
}

// A rank that knows of the failure connects anew at once; one that does not asks the others first.
TEST_F(ControlTest, AFailedWorldIsLeftBehindByRanksThatDoNotKnowYet) {
  expect_all_ok(run_processes(3, {}, [](int rank) {
    for (int round = 0; round < 5; ++round) {
      Communicator failed = connect_world({.timeout = std::chrono::milliseconds(20'000)});
      if (rank == 1) failed.abort("the disk is full");
      Communicator next = connect_world({.timeout = std::chrono::milliseconds(20'000)});
      if (!adds_up(next)) return 1;
    }
    return 0;
  }));
}

// Sockets, and descriptors of processes.
std::set<int> open_connections() {
  std::set<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the descriptor of the folder
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with("socket:") || target == "anon_inode:[pidfd]") {
      found.insert(std::stoi(entry.path().filename().string()));
    }
  }
  return found;
}

TEST_F(ControlTest, AForkedChildHasNoConnectionsAndCannotMakeItsOwn) {
  expect_all_ok(run_processes(2, {}, [](int) {
    const std::set<int> before = open_connections();
    Communicator world = connect_world();
    if (open_connections() == before) return 3;
    const pid_t child = ::fork();
    if (child == 0) {
      if (open_connections() != before) ::_exit(4);
      const std::string message = usage_error_of({});
      ::_exit(message.find("forked child") == std::string::npos ? 1 : 0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    if (!adds_up(world)) return 2;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  }));
}

TEST_F(ControlTest, AWorldOfOneNeedsNobody) {
  expect_all_ok(run_processes(1, {}, [](int) {
    Communicator world = connect_world();
    return world.size() == 1 && adds_up(world) ? 0 : 1;
  }));
}

}  // namespace
}  // namespace hsdp
