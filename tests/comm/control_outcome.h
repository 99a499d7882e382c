// What the tests of Control share: how a rank reports what it threw, and what a message must name.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/rendezvous/launch_environment.h"
#include "hsdp/comm/world.h"
#include "hsdp/error.h"
#include "tests/support/private_runtime.h"
#include "tests/support/process_ranks.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::comm {

using std::chrono::milliseconds;
using test::note;
using test::ProcessOptions;
using test::ProcessRanks;
using test::RankOutcome;
using test::run_processes;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

inline constexpr milliseconds kTimeout{2'000};
inline constexpr int kPeerLost = 11;
inline constexpr int kTimedOut = 12;
inline constexpr int kMismatched = 13;
inline constexpr int kUsage = 14;

inline std::shared_ptr<Control> connect(milliseconds timeout = kTimeout) {
  return connect_control(detect_launch(), timeout);
}

inline std::vector<int> everyone(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

inline std::vector<int> everyone_but(int rank, int size) {
  std::vector<int> ranks = everyone(size);
  std::erase(ranks, rank);
  return ranks;
}

// Runs `body`; the exit code tells what it threw, and the notes have the message.
inline int outcome_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  const auto noted = [&](const RankError& error, int code) {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    note(error.what());
    note("took " + std::to_string(took.count()));
    for (const int rank : error.ranks()) note("at fault " + std::to_string(rank));
    return code;
  };
  try {
    body();
  } catch (const PeerLostError& error) {
    return noted(error, kPeerLost);
  } catch (const TimeoutError& error) {
    return noted(error, kTimedOut);
  } catch (const MismatchError& error) {
    return noted(error, kMismatched);
  } catch (const UsageError& error) {
    note(error.what());
    return kUsage;
  }
  return 0;
}

inline bool is_refused(const std::function<void()>& call) {
  return test::caught<UsageError>(call).has_value();
}

// Members of `group` pass each other memory that holds its owner's rank.
inline bool descriptors_pass(Control& control, const std::vector<int>& group) {
  const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC));
  const char own = static_cast<char>('a' + control.rank());
  if (::write(memory.get(), &own, 1) != 1) return false;
  const auto fds = control.exchange_descriptors("memory", group, memory.get());
  for (std::size_t i = 0; i < fds.size(); ++i) {
    char theirs = 0;
    const bool read = fds[i] && ::pread(fds[i].get(), &theirs, 1, 0) == 1;
    if (read == (group[i] == control.rank())) return false;
    if (read && theirs != static_cast<char>('a' + group[i])) return false;
  }
  return fds.size() == group.size();
}

inline int try_to_connect(milliseconds timeout = kTimeout) {
  return outcome_of([timeout] { static_cast<void>(connect(timeout)); });
}

inline void expect_all_ok(const std::vector<RankOutcome>& outcomes) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_TRUE(outcomes[rank].ok())
        << "rank " << rank << ": exit code " << outcomes[rank].exit_code << " "
        << outcomes[rank].error << ::testing::PrintToString(outcomes[rank].notes);
  }
}

inline double seconds_noted(const RankOutcome& outcome) {
  for (const std::string& line : outcome.notes) {
    if (line.starts_with("took ")) return std::stod(line.substr(5));
  }
  return -1;
}

// Longer than anything takes on a busy machine, shorter than a hang.
inline constexpr double kHangSeconds = 15;

inline std::vector<std::string> blamed_in(std::vector<std::string> lines) {
  std::erase_if(lines, [](const std::string& line) { return !line.starts_with("at fault "); });
  return lines;
}

// The ranks raised the expected error, with everything that the message must name. They blamed the
// ranks named at fault and no others, if any are named.
inline void expect_failure(const std::vector<RankOutcome>& outcomes, const std::vector<int>& ranks,
                           int code, const std::vector<std::string>& named) {
  for (const int rank : ranks) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    const std::string all = ::testing::PrintToString(outcome.notes) + outcome.error;
    EXPECT_EQ(outcome.exit_code, code) << all;
    for (const std::string& text : named) EXPECT_THAT(all, HasSubstr(text));
    const auto at_fault = blamed_in(named);
    if (!at_fault.empty()) {
      EXPECT_EQ(blamed_in(outcome.notes), at_fault);
    }
    EXPECT_GE(seconds_noted(outcome), 0) << all;
    EXPECT_LT(seconds_noted(outcome), kHangSeconds) << all;
  }
}

// Whether the process has an I/O thread and all its threads but the calling one are asleep.
inline bool io_is_asleep(pid_t pid) {
  const std::string own = std::to_string(::gettid());
  bool has_io_thread = false;
  for (const auto& thread :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
    if (thread.path().filename() == own) continue;
    std::ifstream file(thread.path() / "stat");
    std::string stat;
    std::getline(file, stat);
    const std::size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos || stat.substr(name_end, 4) != ") S ") return false;
    has_io_thread = has_io_thread || stat.substr(0, name_end).ends_with("(hsdp-control");
  }
  return has_io_thread;
}

// Waits until the I/O threads of these ranks have nothing left to do. An I/O thread runs from the
// moment its rank has a connection. Name rank 0 last, as it hears from the others.
inline bool wait_until_connected(const ProcessRanks& ranks, const std::vector<int>& named) {
  for (const int rank : named) {
    constexpr int kLooks = 3;
    int calm_looks = 0;
    for (int attempt = 0; attempt < 10'000 && calm_looks < kLooks; ++attempt) {
      calm_looks = io_is_asleep(ranks.pid(rank)) ? calm_looks + 1 : 0;
      std::this_thread::sleep_for(milliseconds(1));
    }
    if (calm_looks < kLooks) return false;
  }
  return true;
}

// Ranks 0 to 2 of 4 meet, rank 3 keeps the rendezvous open, and the victim is killed meanwhile.
inline void expect_a_joined_rank_named_when_killed(const ProcessOptions& options, int victim) {
  ProcessRanks ranks(4, options, [](int rank) {
    while (rank == 3) ::pause();
    return try_to_connect(milliseconds(20'000));
  });
  ASSERT_TRUE(wait_until_connected(ranks, {1, 2, 0}));
  ranks.signal(victim, SIGKILL);
  const std::vector<int> others = everyone_but(victim, 3);
  for (const int rank : others) EXPECT_TRUE(ranks.wait_for_end(rank));
  ranks.signal(3, SIGKILL);
  expect_failure(ranks.finish(), others, kPeerLost,
                 {"rendezvous: rank " + std::to_string(victim) + " of 4 was lost",
                  "at fault " + std::to_string(victim)});
}

// Checks that nothing is left in the runtime directory.
class ControlTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_THAT(runtime_.leftovers(), ::testing::IsEmpty()); }
  test::PrivateRuntime runtime_;
};

}  // namespace hsdp::comm
