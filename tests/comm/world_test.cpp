// connect_world: the choice of engine, and one set of connections per process.
#include "hsdp/comm/world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>

#include "tests/comm/control_outcome.h"

namespace hsdp {
namespace {

using comm::ControlTest;
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

TEST(WorldTest, AnEngineThatCannotServeIsNamed) {
  WorldOptions options;
  options.engine = "host";
  options.device.type = DeviceType::kCuda;
  EXPECT_THAT(usage_error_of(options), AllOf(HasSubstr("cuda:0"), HasSubstr("nccl")));
  options.engine = "gloo";
  EXPECT_THAT(usage_error_of(options), HasSubstr("auto, host, nccl, mpi, got 'gloo'"));
}

TEST(WorldTest, AWrongTransportIsNamed) {
  ::setenv("HSDP_TRANSPORT", "pigeon", 1);
  EXPECT_THAT(usage_error_of({}), AllOf(HasSubstr("HSDP_TRANSPORT"), HasSubstr("pigeon")));
  ::unsetenv("HSDP_TRANSPORT");
}

TEST(WorldTest, ATimeoutThatNoClockHoldsIsNamed) {
  WorldOptions options;
  options.timeout = std::chrono::milliseconds::max();
  EXPECT_THAT(usage_error_of(options), HasSubstr("expected 0.001 to 1000000 seconds, got 9.2"));
  options.timeout = std::chrono::milliseconds(-1);
  EXPECT_THAT(usage_error_of(options), HasSubstr("seconds, got -0.001"));
}

// Sums of 1 + 2 + ... over the ranks.
bool adds_up(Communicator& world) {
  std::array<float, 5> data{};
  data.fill(static_cast<float>(world.rank() + 1));
  world.all_reduce(TensorView{data.data(), static_cast<std::int64_t>(data.size()), Dtype::kF32});
  const auto expected = static_cast<float>(world.size() * (world.size() + 1) / 2);
  for (const float value : data) {
    if (value != expected) return false;
  }
  return true;
}

TEST_F(ControlTest, ASecondCallSharesTheConnections) {
  const auto outcomes = run_processes(3, {}, [](int) {
    for (int round = 0; round < 2; ++round) {  // and all can begin anew
      std::optional<Communicator> first = connect_world();
      Communicator second = connect_world();
      if (first->engine() != second.engine()) return 1;
      if (!adds_up(*first)) return 2;
      first.reset();
      if (!adds_up(second)) return 3;
    }
    return 0;
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
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

// A garbage collector lets go of a world at another time on every rank.
TEST_F(ControlTest, RanksAgreeWhenSomeStillHoldTheFirstWorld) {
  for (const int holder : {0, 2}) {
    const auto outcomes = run_processes(3, {}, [holder](int rank) {
      std::optional<Communicator> first = connect_world();
      if (rank != holder) first.reset();
      for (int round = 0; round < 2; ++round) {  // the second one is shared
        Communicator second = connect_world();
        if (!adds_up(second)) return 1;
        const Communicator third = connect_world();
        if (third.engine() != second.engine()) return 2;
      }
      return 0;
    });
    for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
  }
}

// Also when the connections are still there and only the group of all ranks is gone.
TEST_F(ControlTest, RanksAgreeWhenSomeHoldAPartOfTheFirstWorld) {
  for (const int holder : {0, 2}) {
    const auto outcomes = run_processes(3, {}, [holder](int rank) {
      std::optional<Communicator> first = connect_world();
      Communicator part = first->split(0, rank);
      if (rank != holder) first.reset();
      Communicator second = connect_world();
      return adds_up(second) && adds_up(part) ? 0 : 1;
    });
    for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
  }
}

// A rank that still uses the old world with others goes on when one of them meets anew.
TEST_F(ControlTest, AnOldWorldGoesOnBesideTheNextOne) {
  const auto outcomes = run_processes(3, {}, [](int rank) {
    std::optional<Communicator> first = connect_world();
    Communicator pair = first->split(rank == 2 ? 1 : 0, rank);
    first.reset();
    if (rank == 2) pair = {};
    Communicator second = connect_world();
    if (!adds_up(second)) return 1;
    return rank == 2 || adds_up(pair) ? 0 : 2;
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
}

TEST_F(ControlTest, AFailedWorldIsLeftBehindWhoeverHoldsIt) {
  const auto outcomes = run_processes(3, {}, [](int rank) {
    Communicator failed = connect_world();
    if (rank == 1) failed.abort("the disk is full");
    const auto barrier_error = [&failed] {
      try {
        for (;;) failed.barrier();
      } catch (const RankError& error) {
        return std::string(error.what());
      }
    };
    if (barrier_error().find("the disk is full") == std::string::npos) return 1;
    Communicator next = connect_world();
    if (!adds_up(next)) return 2;
    return barrier_error().find("the disk is full") == std::string::npos ? 3 : 0;
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
}

// A rank that knows of the failure meets the others anew; one that does not asks them first.
TEST_F(ControlTest, AFailedWorldIsLeftBehindByRanksThatDoNotKnowYet) {
  const auto outcomes = run_processes(3, {}, [](int rank) {
    for (int round = 0; round < 5; ++round) {
      Communicator failed = connect_world({.timeout = std::chrono::milliseconds(20'000)});
      if (rank == 1) failed.abort("the disk is full");
      Communicator next = connect_world({.timeout = std::chrono::milliseconds(20'000)});
      if (!adds_up(next)) return 1;
    }
    return 0;
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
}

TEST_F(ControlTest, AForkedChildCannotConnectBesideItsParent) {
  const auto outcomes = run_processes(2, {}, [](int) {
    Communicator world = connect_world();
    const pid_t child = ::fork();
    if (child == 0) {
      const std::string message = usage_error_of({});
      ::_exit(message.find("forked child") == std::string::npos ? 1 : 0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    if (!adds_up(world)) return 2;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
}

TEST_F(ControlTest, AWorldOfOneNeedsNobody) {
  const auto outcomes = run_processes(1, {}, [](int) {
    Communicator world = connect_world();
    return world.size() == 1 && adds_up(world) ? 0 : 1;
  });
  EXPECT_EQ(outcomes[0].exit_code, 0) << outcomes[0].error;
}

}  // namespace
}  // namespace hsdp
