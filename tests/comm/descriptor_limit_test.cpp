// Ranks that reach their limit of open files while they join: the others wait, or the error names
// them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/rendezvous/job_directory.h"
#include "tests/comm/tcp_door.h"

namespace hsdp::comm {
namespace {

constexpr milliseconds kAMoment{300};
constexpr milliseconds kShort{1'500};
constexpr milliseconds kLong{20'000};

// Takes all descriptors of this process up to a low limit, except `spare` of them.
class FullTable {
 public:
  explicit FullTable(std::size_t spare = 0) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 128;
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) throw std::runtime_error("setrlimit");
    for (int fd = 0; (fd = ::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0)) >= 0;)
      taken_.emplace_back(fd);
    if (errno != EMFILE) throw std::runtime_error("dup");
    for (; spare > 0; --spare) taken_.pop_back();
  }
  // Frees all of them a moment later, on another thread.
  void free_soon() {
    thread_ = std::thread([this] {
      std::this_thread::sleep_for(kAMoment);
      taken_.clear();
    });
  }
  ~FullTable() {
    if (thread_.joinable()) thread_.join();
  }
  FullTable(const FullTable&) = delete;
  FullTable& operator=(const FullTable&) = delete;

 private:
  std::vector<UniqueFd> taken_;
  std::thread thread_;
};

class DescriptorLimitTest : public ControlTest, public ::testing::WithParamInterface<bool> {
 protected:
  [[nodiscard]] static ProcessOptions options() {
    const bool over_tcp = GetParam();
    return over_tcp ? ranks_on_hosts(free_port()) : ProcessOptions{};
  }
};

auto names_the_limit() { return AllOf(HasSubstr("128 open files"), HasSubstr("ulimit -n")); }

int join_all(int size, milliseconds timeout) {
  return outcome_of([&] {
    const auto control = connect(timeout);
    static_cast<void>(control->exchange("word", everyone(size), "", {"test"}));
    for (int peer = 0; peer < size; ++peer) {
      if (!control->shares_memory_with(peer)) throw UsageError("shares no memory");
    }
  });
}

TEST_P(DescriptorLimitTest, ARankWaitsUntilDescriptorsAreFree) {
  for (const int full : {0, 1}) {
    expect_all_ok(run_processes(3, options(), [full](int rank) {
      std::optional<FullTable> table;
      if (rank == full) table.emplace().free_soon();
      return join_all(3, kLong);
    }));
  }
}

TEST_P(DescriptorLimitTest, ARankThatGetsNoneNamesTheLimit) {
  for (const int full : {0, 1}) {
    const auto outcomes = run_processes(2, options(), [full](int rank) {
      if (rank != full) return join_all(2, kShort);
      const FullTable table;
      return join_all(2, milliseconds(700));
    });
    for (const int rank : {0, 1}) {
      const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      EXPECT_LT(outcome.seconds, 10.0);
      if (rank == full) {
        EXPECT_THAT(outcome.error, AllOf(HasSubstr("rendezvous: "), names_the_limit()));
      } else {
        EXPECT_EQ(outcome.exit_code, kTimedOut) << outcome.error;
      }
    }
  }
}

// Rank 0 listens, and its table is full when the others come.
void fill_when_listening(const std::function<void()>& join, bool frees) {
  const auto count_threads = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  };
  std::promise<void> counted;
  std::thread filler([frees, count_threads, &counted] {
    const auto before = count_threads();
    counted.set_value();
    while (count_threads() == before) {  // until its I/O thread runs too
      std::this_thread::sleep_for(milliseconds(1));
    }
    FullTable table;
    note("full");
    if (frees) return table.free_soon();
    for (;;) ::pause();
  });
  counted.get_future().wait();
  filler.detach();
  join();
}

TEST_P(DescriptorLimitTest, RankZeroLetsRanksInWhenDescriptorsAreFree) {
  for (const bool frees : {true, false}) {
    const milliseconds timeout = frees ? kLong : kShort;
    ProcessRanks ranks(4, options(), [&](int rank) {
      if (rank != 0) {
        ::raise(SIGSTOP);
        return join_all(4, timeout);
      }
      int code = 0;
      fill_when_listening([&] { code = join_all(4, timeout); }, frees);
      return code;
    });
    ASSERT_TRUE(ranks.wait_for_note(0, "full"));
    for (int rank = 1; rank < 4; ++rank) {
      ASSERT_TRUE(ranks.wait_until_stopped(rank));
      ranks.signal(rank, SIGCONT);
    }
    const auto outcomes = ranks.finish();
    for (const auto& outcome : outcomes) {
      EXPECT_EQ(outcome.exit_code, frees ? 0 : kTimedOut)
          << outcome.error << ::testing::PrintToString(outcome.notes);
    }
    if (!frees) {
      EXPECT_THAT(::testing::PrintToString(outcomes[0].notes), names_the_limit());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Doors, DescriptorLimitTest, ::testing::Bool(),
                         [](const auto& over_tcp) { return over_tcp.param ? "Tcp" : "Unix"; });

TEST_F(ControlTest, AGroupIsMadeWhenDescriptorsAreFree) {
  for (const bool frees : {true, false}) {
    const auto outcomes = run_processes(3, {}, [frees](int rank) {
      Communicator world = connect_world({.timeout = frees ? kLong : kShort});
      std::optional<FullTable> table;
      if (rank == 1) table.emplace();
      if (rank == 1 && frees) table->free_soon();
      world.split(0, rank).barrier();
      return 0;
    });
    if (frees) {
      expect_all_ok(outcomes);
      continue;
    }
    for (const auto& outcome : outcomes) {
      EXPECT_THAT(outcome.error, AllOf(names_the_limit(), HasSubstr("(rank 1 of 3)")));
    }
  }
}

// Waits until the I/O thread has opened and closed all that the rendezvous needs.
void settle(Control& control, int size) {
  static_cast<void>(control.exchange("settled", everyone(size), "", {"test"}));
  for (int calm_looks = 0; calm_looks < 3;) {
    calm_looks = io_is_asleep(::getpid()) ? calm_looks + 1 : 0;
    std::this_thread::sleep_for(milliseconds(5));
  }
}

// Descriptors that peers send wait in the socket while this process has no free number for them.
TEST_F(ControlTest, APassedDescriptorIsNotLostAtTheLimit) {
  for (const int full : {0, 2}) {
    for (const bool frees : {true, false}) {
      const auto outcomes = run_processes(3, {}, [&](int rank) {
        return outcome_of([&] {
          const auto control = connect(frees ? kLong : kShort);
          const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
          settle(*control, 3);
          std::optional<FullTable> table;
          if (rank == full) table.emplace(1);  // the rank's own copy, which it passes on
          // No rank sends before the table is full.
          static_cast<void>(control->exchange("full", everyone(3), "", {"test"}));
          if (rank == full && frees) table->free_soon();
          const auto fds = control->exchange_descriptors("fds", everyone(3), memory.get());
          for (int peer = 0; peer < 3; ++peer) {
            if (!fds[static_cast<std::size_t>(peer)] != (peer == rank)) throw UsageError("none");
          }
          static_cast<void>(control->exchange("done", everyone(3), "", {"test"}));
        });
      });
      if (frees) {
        expect_all_ok(outcomes);
        continue;
      }
      for (const auto& outcome : outcomes) EXPECT_NE(outcome.exit_code, 0);
      // Fails when it makes its own copy, or when it receives the others'.
      const RankOutcome& outcome = outcomes[static_cast<std::size_t>(full)];
      EXPECT_THAT(outcome.error + ::testing::PrintToString(outcome.notes), names_the_limit());
    }
  }
}

}  // namespace
}  // namespace hsdp::comm
