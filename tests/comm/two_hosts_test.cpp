// Two "hosts" as network namespaces with two ranks each: 0 and 1 on the first, 2 and 3 on the
// second.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/unique_fd.h"
#include "tests/comm/control_outcome.h"

namespace hsdp::comm {
namespace {

bool runs(const std::string& command) {
  return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
}

// A veth pair between two namespaces: 10.77.0.1 and 10.77.0.2.
class TwoHosts {
 public:
  TwoHosts() {
    // The addresses are private to the namespaces, so that tests side by side do not collide.
    ok_ = runs("ip netns add " + name(0)) && runs("ip netns add " + name(1)) &&
          runs("ip link add " + link(0) + " netns " + name(0) + " type veth peer name " + link(1) +
               " netns " + name(1));
    for (const int host : {0, 1}) {
      const std::string ip = "ip -n " + name(host);
      ok_ = ok_ &&
            runs(ip + " addr add 10.77.0." + std::to_string(host + 1) + "/24 dev " + link(host)) &&
            runs(ip + " link set " + link(host) + " up") && runs(ip + " link set lo up");
    }
  }
  ~TwoHosts() {
    for (const int host : {0, 1}) runs("ip netns del " + name(host));
  }
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  [[nodiscard]] bool ok() const { return ok_; }
  void enter(int host) const {
    const UniqueFd space(::open(("/run/netns/" + name(host)).c_str(), O_RDONLY | O_CLOEXEC));
    if (::setns(space.get(), CLONE_NEWNET) != 0) throw std::runtime_error("setns");
  }
  void cut() const { EXPECT_TRUE(runs("ip -n " + name(1) + " link set " + link(1) + " down")); }

 private:
  [[nodiscard]] std::string name(int host) const { return prefix_ + std::to_string(host); }
  [[nodiscard]] static std::string link(int host) { return "veth" + std::to_string(host); }
  std::string prefix_ = "hsdp-test-" + std::to_string(::getpid()) + "-";
  bool ok_ = false;
};

class TwoHostsTest : public ControlTest {
 protected:
  void SetUp() override {
    if (!hosts_.ok()) {
      GTEST_SKIP() << "this machine allows no network namespaces (needs root and ip netns)";
    }
  }
  [[nodiscard]] ProcessOptions options() const {
    return {.environment = {{"LOCAL_WORLD_SIZE", "2"},
                            {"HSDP_ADDR", "10.77.0.1"},
                            {"HSDP_PORT", "4100"},
                            {"HSDP_SECRET", "the secret of this job"}},
            .before = [this](int rank) {
              ::setenv("LOCAL_RANK", std::to_string(rank % 2).c_str(), 1);
              hosts_.enter(rank / 2);
            }};
  }
  TwoHosts hosts_;
};

TEST_F(TwoHostsTest, DescriptorsPassWithinAHostOnly) {
  expect_all_ok(run_processes(4, options(), [](int rank) {
    const auto control = connect();
    for (int peer = 0; peer < 4; ++peer) {
      if (control->shares_memory_with(peer) != (peer / 2 == rank / 2)) return 1;
      if (control->host_of(peer) != peer / 2) return 5;
    }
    if (control->address() != "10.77.0." + std::to_string(rank / 2 + 1)) return 2;
    const std::vector<int> local{rank / 2 * 2, rank / 2 * 2 + 1};
    if (!descriptors_pass(*control, local)) return 3;
    const auto pass_far = [&] {
      static_cast<void>(control->exchange_descriptors("far", everyone(4), STDIN_FILENO));
    };
    if (!is_refused(pass_far)) return 4;
    static_cast<void>(control->exchange("done", everyone(4), "", {"test"}));
    return 0;
  }));
}

// A raw fork keeps the victim's sockets open: the ranks of its host see that the process ended.
TEST_F(TwoHostsTest, AKilledRankIsNamedOnBothHosts) {
  for (const int victim : {1, 2, 3}) {
    ProcessRanks ranks(4, options(), [victim](int rank) {
      const auto control = connect(milliseconds(20'000));
      if (rank == victim && ::_Fork() == 0) {
        for (;;) ::pause();
      }
      note("ready");
      return outcome_of([&] {
        if (rank == victim) {
          for (;;) ::pause();
        }
        static_cast<void>(control->exchange("never", everyone(4), "", {"all_reduce", 1}));
      });
    });
    for (int rank = 0; rank < 4; ++rank) ASSERT_TRUE(ranks.wait_for_note(rank, "ready"));
    ranks.signal(victim, SIGKILL);
    expect_failure(ranks.finish(), everyone_but(victim, 4), kPeerLost,
                   {"all_reduce of bucket 1: rank " + std::to_string(victim) + " of 4 was lost",
                    "at fault " + std::to_string(victim)});
  }
}

TEST_F(TwoHostsTest, ADeadLinkIsNoticedOnBothSides) {
  ProcessRanks ranks(4, options(), [](int) {
    const auto control = connect();
    note("ready");
    return outcome_of([&] {
      const auto slot = control->begin_wait({"all_reduce", 4});
      while (!control->failed()) std::this_thread::sleep_for(milliseconds(10));
      control->end_wait(slot);
      control->throw_if_failed();
    });
  });
  for (const int rank : everyone(4)) ASSERT_TRUE(ranks.wait_for_note(rank, "ready"));
  hosts_.cut();
  for (const auto& outcome : ranks.finish()) {
    EXPECT_THAT(outcome.exit_code, ::testing::AnyOf(kPeerLost, kTimedOut)) << outcome.error;
    EXPECT_LT(seconds_noted(outcome), kHangSeconds);
  }
}

}  // namespace
}  // namespace hsdp::comm
