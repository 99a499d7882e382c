// Worlds in which most ranks speak to rank 0 through others: processes of one host, and of many
// hosts that this one simulates by giving each another user.
#include "hsdp/comm/control/control_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tests/comm/tcp_door.h"

namespace hsdp::comm {
namespace {

constexpr milliseconds kLong{60'000};
constexpr int kPerHost = 8;

class ControlTreeTest : public ControlTest {
 protected:
  void SetUp() override {
    ControlTest::SetUp();
    if (::geteuid() != 0) GTEST_SKIP() << "to pretend to be many hosts needs root";
  }
  // Each host's processes belong to another user, which shares no memory and no socket with the
  // others.
  static ProcessOptions hosts() {
    ProcessOptions options = ranks_on_hosts(free_port());
    options.environment["LOCAL_WORLD_SIZE"] = std::to_string(kPerHost);
    options.deadline = kLong;
    options.before = [](int rank) {
      constexpr uid_t kFirstUser = 61'000;
      const uid_t user = kFirstUser + static_cast<uid_t>(rank / kPerHost);
      ::setenv("LOCAL_RANK", std::to_string(rank % kPerHost).c_str(), 1);
      ::unsetenv("XDG_RUNTIME_DIR");
      if (::setresuid(user, user, user) != 0) throw std::runtime_error("setresuid");
      ::prctl(PR_SET_DUMPABLE, 1);  // otherwise /proc/self belongs to root
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    };
    return options;
  }
};

std::ptrdiff_t open_descriptors() {
  return std::ranges::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                               std::filesystem::directory_iterator()) -
         1;
}

std::int64_t bytes_sent(const Control& control) {
  std::int64_t bytes = 0;
  for (const ControlLinkStats& link : control.links()) bytes += link.sent_bytes;
  return bytes;
}

std::vector<int> host_of(int rank) {
  std::vector<int> ranks(kPerHost);
  std::iota(ranks.begin(), ranks.end(), rank / kPerHost * kPerHost);
  return ranks;
}

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

Agreement agree(Control& control, const std::string& key, const std::vector<int>& members,
                const Saying& mine) {
  control.post(key, members, mine);
  return control.collect(key, members, {"test"});
}

TEST(ControlTree, IsFlatWhileRankZeroCanHearEverybody) {
  EXPECT_TRUE(ControlTree(std::vector<std::string>(17, "a")).is_flat());
  EXPECT_TRUE(ControlTree({"a", "b", "a", "b"}).is_flat());
  EXPECT_FALSE(ControlTree(std::vector<std::string>(18, "a")).is_flat());
}

TEST(ControlTree, HostsSpeakThroughTheirLowestRankAndAtMostFanOutThroughOne) {
  const ControlTree tree({"a", "b", "a", "b", "b", "b", "b", "a"}, 2);
  EXPECT_EQ(tree.parent(0), -1);
  EXPECT_THAT(tree.children(1), ElementsAre(3, 4));
  EXPECT_THAT(tree.children(3), ElementsAre(5, 6));
  EXPECT_THAT(tree.children(0), ElementsAre(1, 2, 7));
  EXPECT_THAT(tree.below(1), ElementsAre(3, 4, 5, 6));
  EXPECT_THAT(tree.below(6), ElementsAre());
}

TEST_F(ControlTreeTest, ThirtyTwoHostsRegisterWithFewDescriptorsAndBytes) {
  constexpr int kSize = 256;
  const auto outcomes = run_processes(kSize, hosts(), [](int rank) {
    const auto inherited = open_descriptors();
    const auto control = connect(kLong);
    require(open_descriptors() - inherited <= 64, "too many descriptors");
    const std::int64_t before = bytes_sent(*control);
    for (int i = 0; i < 291; ++i) {
      const std::string key = "parameter " + std::to_string(i);
      const std::string name = "layers." + std::to_string(i) + ".weight f32 4096x4096";
      const bool differs = i == 200 && rank == 77;
      const Agreement all =
          agree(*control, key, everyone(kSize), message_to_all(differs ? name + "x" : name));
      const auto& said = all.places.at(0).said;
      require(said.size() == (i == 200 ? 2U : 1U), "texts that were said: " + name);
      require(i != 200 || said[1].ranks == std::vector<int>{77}, "who said the other text");
    }
    require(rank != 0 || bytes_sent(*control) - before <= 1'000'000, "too many bytes");
    return 0;
  });
  expect_all_ok(outcomes);
}

TEST_F(ControlTreeTest, GroupsWithinAndAcrossHostsTellAndAgree) {
  constexpr int kSize = 40;
  expect_all_ok(run_processes(kSize, hosts(), [](int rank) {
    const auto control = connect(kLong);
    std::vector<int> across;
    for (int other = rank % kPerHost; other < kSize; other += kPerHost) across.push_back(other);
    std::atomic<int> heard{0};
    const auto listening = control->listen("test", [&](int from, std::string_view message) {
      if (message == std::to_string(from) + " to " + std::to_string(rank)) ++heard;
    });
    static_cast<void>(control->exchange("listen", everyone(kSize), "", {"test"}));
    for (int to = 0; to < kSize; ++to) {
      if (to != rank) {
        control->tell(to, "test", std::to_string(rank) + " to " + std::to_string(to));
      }
    }
    for (int round = 0; round < 20; ++round) {
      const std::string key = "round " + std::to_string(round);
      for (const auto& group : {host_of(rank), across, everyone(kSize)}) {
        // What the other ranks have said is passed on without the rank that is late.
        if (round % 7 == 6 && rank == 3 * round) std::this_thread::sleep_for(milliseconds(700));
        const Agreement all = agree(*control, key, group, {.sum = {rank}, .most = {-rank}});
        std::int64_t sum = 0;
        for (const int member : group) sum += member;
        require(all.sum.at(0) == sum && all.most.at(0) == -group.front(), key);
      }
      const auto said = control->exchange(key + " all", across, std::to_string(rank), {"test"});
      for (std::size_t i = 0; i < across.size(); ++i) {
        require(said[i] == std::to_string(across[i]), key + " all");
      }
    }
    require(descriptors_pass(*control, host_of(rank)), "descriptors");
    while (heard < kSize - 1) std::this_thread::sleep_for(milliseconds(1));
    static_cast<void>(control->exchange("done", everyone(kSize), "", {"test"}));
    return 0;
  }));
}

struct Kill {
  const char* who;
  std::vector<int> ranks;
};

// HSDP_SEEDS asks for that many kills of each kind, among 256 ranks.
TEST_F(ControlTreeTest, WhoIsKilledIsNamedByEverySurvivor) {
  const char* const asked = std::getenv("HSDP_SEEDS");
  const int size = asked != nullptr ? 256 : 40;
  const int times = asked != nullptr ? std::stoi(asked) : 1;
  for (const Kill& kill : {Kill{"a leader", {16}}, Kill{"rank 0", {0}},
                           Kill{"a host", {16, 17, 18, 19, 20, 21, 22, 23}}}) {
    for (int time = 0; time < times; ++time) {
      SCOPED_TRACE(kill.who);
      ProcessRanks ranks(size, hosts(), [&](int rank) {
        const auto control = connect(kLong);
        note("ready");
        if (std::ranges::find(kill.ranks, rank) != kill.ranks.end()) {
          for (;;) ::pause();
        }
        return outcome_of(
            [&] { static_cast<void>(control->exchange("never", everyone(size), "", {"status"})); });
      });
      for (int rank = 0; rank < size; ++rank) ASSERT_TRUE(ranks.wait_for_note(rank, "ready"));
      for (const int rank : kill.ranks) ranks.signal(rank, SIGKILL);
      const auto outcomes = ranks.finish();
      for (int rank = 0; rank < size; ++rank) {
        if (std::ranges::find(kill.ranks, rank) != kill.ranks.end()) continue;
        const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
        EXPECT_EQ(outcome.exit_code, kPeerLost)
            << "rank " << rank << ": " << ::testing::PrintToString(outcome.notes);
        for (const std::string& line : blamed_in(outcome.notes)) {
          const int blamed = std::stoi(line.substr(line.rfind(' ')));
          EXPECT_THAT(kill.ranks, ::testing::Contains(blamed)) << "rank " << rank;
        }
      }
    }
  }
}

TEST_F(ControlTreeTest, ALeaderThatStopsIsNamedAndNotThoseBelowIt) {
  constexpr int kSize = 40;
  ProcessRanks ranks(kSize, hosts(), [](int rank) {
    const auto control = connect(milliseconds(4'000));
    note("ready");
    if (rank == 16) {
      for (;;) ::pause();
    }
    return outcome_of(
        [&] { static_cast<void>(control->exchange("never", everyone(kSize), "", {"status"})); });
  });
  for (int rank = 0; rank < kSize; ++rank) ASSERT_TRUE(ranks.wait_for_note(rank, "ready"));
  ranks.signal(16, SIGSTOP);
  for (const int rank : everyone_but(16, kSize)) EXPECT_TRUE(ranks.wait_for_end(rank));
  ranks.signal(16, SIGKILL);
  expect_failure(ranks.finish(), everyone_but(16, kSize), kTimedOut, {"at fault 16"});
}

// The ranks that speak through it are cut off and are told why; the others continue.
TEST_F(ControlTreeTest, ALeaderThatClosesEarlyIsNamedByThoseWhoNeedIt) {
  constexpr int kSize = 40;
  const auto outcomes = run_processes(kSize, hosts(), [](int rank) {
    auto control = connect(milliseconds(20'000));
    static_cast<void>(control->exchange("first", everyone(kSize), "", {"test"}));
    if (rank == 16) {
      control.reset();
      return 0;
    }
    return outcome_of([&] {
      if (rank < 16) {
        std::vector<int> group(16);
        std::iota(group.begin(), group.end(), 0);
        std::this_thread::sleep_for(milliseconds(100));
        static_cast<void>(control->exchange("without it", group, "", {"test"}));
        note("went on");
      }
      static_cast<void>(control->exchange("never", everyone(kSize), "", {"status"}));
    });
  });
  expect_failure(outcomes, everyone_but(16, kSize), kPeerLost,
                 {"at fault 16", "it closed its world"});
  for (std::size_t rank = 0; rank < 16; ++rank) {
    EXPECT_THAT(outcomes[rank].notes, ::testing::Contains("went on"));
  }
}

}  // namespace
}  // namespace hsdp::comm
