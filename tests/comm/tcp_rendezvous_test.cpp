// The rendezvous over TCP, with strangers at its port.
#include "hsdp/comm/rendezvous/tcp_rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/comm/control/control_frames.h"
#include "hsdp/comm/rendezvous/handshake.h"
#include "hsdp/comm/rendezvous/join_listener.h"
#include "hsdp/comm/unique_fd.h"
#include "tests/comm/tcp_door.h"
#include "tests/support/temporary_directory.h"

namespace hsdp::comm {
namespace {

using ::testing::Each;
using ::testing::Not;

void send_text(const UniqueFd& socket, const std::string& text) {
  static_cast<void>(::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL));
}

class TcpRendezvousTest : public ControlTest {
 protected:
  [[nodiscard]] ProcessOptions hosts() const { return ranks_on_hosts(port_); }
  int port_ = free_port();
};

int exchange_twice(milliseconds timeout, int size) {
  const auto control = connect(timeout);
  for (const char* key : {"one", "two"}) {
    const auto all =
        control->exchange(key, everyone(size), std::to_string(control->rank()), {"test"});
    for (int rank = 0; rank < size; ++rank) {
      if (all[static_cast<std::size_t>(rank)] != std::to_string(rank)) return 1;
    }
  }
  if (control->address() != "127.0.0.1") return 2;
  return control->secret() == kJobSecret ? 0 : 3;
}

TEST_F(TcpRendezvousTest, RanksMeetAndShareMemoryWhereTheyCan) {
  expect_all_ok(run_processes(3, hosts(), [](int) {
    if (const int code = exchange_twice(kTimeout, 3); code != 0) return code;
    const auto control = connect();
    for (int peer = 0; peer < 3; ++peer) {
      if (!control->shares_memory_with(peer)) return 4;
    }
    const auto fds = control->exchange_descriptors("fds", everyone(3), STDIN_FILENO);
    return fds.size() == 3 ? 0 : 5;
  }));
}

// Strangers that know the secret too, but then send nonsense.
TEST_F(TcpRendezvousTest, StrangersNeitherStallNorJoin) {
  ProcessRanks ranks(2, hosts(), [](int rank) {
    if (rank == 1) ::raise(SIGSTOP);
    return exchange_twice(milliseconds(20'000), 2);
  });
  ASSERT_TRUE(ranks.wait_until_stopped(1));
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 300; ++i) strangers.push_back(connect_to(port_));  // half-open
  const std::string hello = "hsdphsk1" + std::string(32, 'n');
  const std::string endless("\xff\xff\xff\x7f\x01", 5);
  for (const std::string& text :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(1 << 16, '\xff'), std::string("h"),
        hello, hello + std::string(32, 'm'), std::string(1 << 16, '\0'), endless}) {
    strangers.push_back(connect_to(port_));
    send_text(strangers.back(), text);
  }
  JoinFrame foreign;
  foreign.rank = 1;
  foreign.size = 2;
  foreign.job = "another job";
  for (const std::string& text :
       {std::string(100, '\0'), endless, *make_frame(FrameType::kJoin, "no join"),
        *make_frame(FrameType::kFail, ""),
        *make_frame(FrameType::kJoin, std::string(kMaxJoinBytes + 1, 'x')),
        *make_frame(FrameType::kJoin, foreign.encode())}) {
    strangers.push_back(connect_to(port_));
    ASSERT_TRUE(prove_secret(strangers.back().get(), HandshakeRole::kConnecting, kJobSecret,
                             kControlContext, milliseconds(5'000)));
    send_text(strangers.back(), text);
  }
  const auto begin = std::chrono::steady_clock::now();
  ranks.signal(1, SIGCONT);
  expect_all_ok(ranks.finish());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::duration<double>(kHangSeconds));
}

// Forwards connections to rank 0; cuts the first one after it has forwarded a join.
[[noreturn]] void carry(const TakenPort& door, int hub_port) {
  constexpr std::size_t kProofBytes = 40 + 32;  // hello and proof
  for (bool cuts = true;; cuts = false) {
    const UniqueFd rank(::accept(door.fd(), nullptr, nullptr));
    const UniqueFd hub = connect_to(hub_port);
    std::size_t from_rank = 0;
    for (bool open = true; open && !(cuts && from_rank > kProofBytes);) {
      std::array<pollfd, 2> ends{{{rank.get(), POLLIN, 0}, {hub.get(), POLLIN, 0}}};
      ::poll(ends.data(), ends.size(), -1);
      for (const std::size_t from : {0, 1}) {
        if (ends[from].revents == 0) continue;
        std::array<char, 4096> bytes{};
        const ssize_t n = ::recv(ends[from].fd, bytes.data(), bytes.size(), 0);
        open = open && n > 0;
        if (n > 0) send_text(from == 0 ? hub : rank, {bytes.data(), static_cast<std::size_t>(n)});
        if (n > 0 && from == 0) from_rank += static_cast<std::size_t>(n);
      }
    }
    if (cuts) note("cut");
  }
}

TEST_F(TcpRendezvousTest, ARankTriesAgainUntilItIsWelcomed) {
  const TakenPort door;
  door.listen(8);
  ProcessRanks carrier(1, {}, [&](int) -> int { carry(door, port_); });
  ProcessRanks ranks(3, hosts(), [&](int rank) {
    if (rank == 1) ::setenv("HSDP_PORT", std::to_string(door.number()).c_str(), 1);
    if (rank == 2) ::raise(SIGSTOP);
    return exchange_twice(milliseconds(20'000), 3);
  });
  ASSERT_TRUE(carrier.wait_for_note(0, "cut"));
  ASSERT_TRUE(ranks.wait_until_stopped(2));
  ranks.signal(2, SIGCONT);
  expect_all_ok(ranks.finish());
}

TEST_F(TcpRendezvousTest, ARankKilledAfterItJoinedIsNamedByAll) {
  for (const int victim : {0, 1}) {
    port_ = free_port();
    SCOPED_TRACE(victim);
    expect_a_joined_rank_named_when_killed(hosts(), victim);
  }
}

// In milliseconds, of this process's TCP connections.
std::vector<unsigned> bounds_of_connections() {
  std::vector<unsigned> bounds;
  for (int fd = 3; fd < 256; ++fd) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
    if (peer.ss_family != AF_INET) continue;
    unsigned bound = 0;
    length = sizeof bound;
    ::getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &bound, &length);
    bounds.push_back(bound);
  }
  return bounds;
}

// Without a bound, a side would notice a dead host only after timeout_s without an answer.
TEST_F(TcpRendezvousTest, ADeadLinkIsBoundedAtBothEnds) {
  expect_all_ok(run_processes(3, hosts(), [](int rank) {
    const auto control = connect(milliseconds(300'000));
    const auto bounds = bounds_of_connections();
    static_cast<void>(control->exchange("all", everyone(3), "", {"test"}));
    return bounds == std::vector<unsigned>(rank == 0 ? 2 : 1, 30'000) ? 0 : 1;
  }));
}

TEST_F(TcpRendezvousTest, AMissingRankIsNamedWithWhatIsKnownOfIt) {
  const auto expect_missing = [this](int missing, const std::vector<std::string>& named) {
    const auto outcomes = run_processes(2, hosts(), [missing](int rank) {
      return rank == missing ? 0 : try_to_connect(milliseconds(600));
    });
    expect_failure(outcomes, {1 - missing}, kTimedOut, named);
  };
  expect_missing(0, {"(Connection refused, and HSDP_ADDR is a loopback here"});
  expect_missing(1, {"set HSDP_ADDR, if they", ": 127.0.0.1 is a loopback"});
}

// Resolves a name to two addresses, in a mount namespace that can define the name.
int knock_where_the_first_address_answers(const std::filesystem::path& names) {
  const UniqueFd door(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(door.get(), generic, length) != 0 || ::listen(door.get(), 8) != 0 ||
      ::getsockname(door.get(), generic, &length) != 0 || ::unshare(CLONE_NEWNS) != 0 ||
      ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount(names.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) != 0) {
    return 77;
  }
  const Knock knock =
      connect_tcp_hub("two.test", ntohs(address.sin6_port), kJobSecret, milliseconds(300));
  note(knock.problem);
  return knock.somebody_listens && !knock ? 0 : 1;
}

TEST_F(TcpRendezvousTest, AFailedProofTellsMoreThanARefusalElsewhere) {
  const test::TemporaryDirectory folder;
  std::ofstream(folder / "hosts") << "::1 two.test\n127.0.0.1 two.test\n";
  const auto outcomes = run_processes(
      1, {}, [&](int) { return knock_where_the_first_address_answers(folder / "hosts"); });
  if (outcomes[0].exit_code == 77) GTEST_SKIP() << "no right to mount, or no IPv6";
  EXPECT_EQ(outcomes[0].exit_code, 0) << outcomes[0].error;
  EXPECT_THAT(outcomes[0].notes,
              ::testing::ElementsAre(HasSubstr("does not prove this job's secret")));
}

TEST_F(TcpRendezvousTest, AgentsOfTorchrunMayCountRestartsApart) {
  expect_all_ok(run_processes(3, hosts(), [](int rank) {
    ::setenv("TORCHELASTIC_RESTART_COUNT", std::to_string(rank).c_str(), 1);
    return exchange_twice(milliseconds(20'000), 3);
  }));
}

// One rank on each of two nodes. The number of nodes is not given: Slurm's nodes do not use
// addresses of this host alone.
// addresses of this host alone.
void be_in_slurm_step(const std::string& step, int rank) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
    ::unsetenv(name);
  }
  const std::string number = std::to_string(rank);
  ::setenv("SLURM_JOB_ID", "12", 1);
  ::setenv("SLURM_STEP_ID", step.c_str(), 1);
  ::setenv("SLURM_PROCID", number.c_str(), 1);
  ::setenv("SLURM_NODEID", number.c_str(), 1);
  ::setenv("SLURM_NTASKS", "2", 1);
}

TEST_F(TcpRendezvousTest, StepsWithOneNameDoNotMix) {
  ProcessRanks ranks(3, hosts(), [](int rank) {
    be_in_slurm_step(rank == 2 ? "1" : "0", std::min(rank, 1));
    if (rank == 1) ::raise(SIGSTOP);
    if (rank != 2) return exchange_twice(milliseconds(20'000), 2);
    return try_to_connect(milliseconds(10'000));
  });
  ASSERT_TRUE(ranks.wait_until_stopped(1));
  EXPECT_TRUE(ranks.wait_for_end(2));
  ranks.signal(1, SIGCONT);
  auto outcomes = ranks.finish();
  expect_failure(outcomes, {2}, kMismatched,
                 {", Slurm step 0'", ", Slurm step 1'", "HSDP_PORT, give each its own"});
  EXPECT_THAT(outcomes[2].notes, Each(Not(HasSubstr("HSDP_JOB"))));
  outcomes.pop_back();
  expect_all_ok(outcomes);
}

TEST_F(TcpRendezvousTest, RanksThatDoNotBelongTogetherAreToldWhy) {
  const struct {
    std::string title;
    std::function<void(int rank)> set_variables;
    std::vector<std::string> told_to_0;
    std::string not_told_to_0;
    int code_of_1;
    std::vector<std::string> told_to_1;
  } rows[] = {
      {"a wrong secret",
       [](int rank) {
         if (rank == 1) ::setenv("HSDP_SECRET", "a guess", 1);
       },
       {"rank 1 of 2 did not join within",
        "callers from 127.0.0.1 did not prove this job's secret: compare HSDP_SECRET"},
       "called here",
       kTimedOut,
       {"does not prove this job's secret: compare HSDP_SECRET", "another job, step or program"}},
      {"another job",
       [](int rank) {
         if (rank == 1) ::setenv("HSDP_JOB", "the other", 1);
       },
       {"ranks of job 'the other' called here", "HSDP_PORT"},
       "secret",
       kMismatched,
       {"give each its own", "set HSDP_JOB to one name on all of its ranks"}},
      {"another restart, which is no other job",
       [](int rank) {
         be_in_slurm_step("0", rank);
         ::setenv("SLURM_RESTART_COUNT", std::to_string(rank).c_str(), 1);
       },
       {"rank 1 of 2 did not join within"},
       "called here",
       kMismatched,
       {"restart 0 on every rank", "restart 1"}},
      {"parts of a heterogeneous step: one number in two jobs' names",
       [](int rank) {
         be_in_slurm_step("0", rank);
         ::unsetenv("HSDP_JOB");
         ::setenv("SLURM_JOB_ID", std::to_string(12 + rank).c_str(), 1);
       },
       {"called here", "HSDP_PORT"},
       "secret",
       kMismatched,
       {"'Slurm step 12.0", "'Slurm step 13.0", "HSDP_PORT, give each its own",
        "set HSDP_JOB to one name on all of its ranks"}},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.title);
    port_ = free_port();
    const auto outcomes = run_processes(2, hosts(), [&](int rank) {
      row.set_variables(rank);
      return try_to_connect(milliseconds(3'000));
    });
    expect_failure(outcomes, {0}, kTimedOut, row.told_to_0);
    EXPECT_THAT(outcomes[0].notes, Each(Not(HasSubstr(row.not_told_to_0))));
    expect_failure(outcomes, {1}, row.code_of_1, row.told_to_1);
  }
}

void expect_usage_error(const ProcessOptions& options, const std::vector<std::string>& named) {
  for (const auto& outcome : run_processes(2, options, [](int) { return try_to_connect(); })) {
    EXPECT_EQ(outcome.exit_code, kUsage) << outcome.error;
    for (const std::string& name : named) {
      EXPECT_THAT(outcome.notes, ::testing::Contains(HasSubstr(name)));
    }
  }
}

TEST_F(TcpRendezvousTest, NodesOfSlurmDoNotMeetAtALoopback) {
  ProcessOptions nodes = hosts();
  nodes.environment["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)";
  nodes.before = [](int rank) { be_in_slurm_step("0", rank); };
  expect_usage_error(nodes, {"got '127.0.0.1', which means a loopback"});
}

TEST_F(TcpRendezvousTest, WhatIsNotSetIsNamed) {
  ProcessOptions without_secret = hosts();
  without_secret.environment.erase("HSDP_SECRET");
  expect_usage_error(without_secret, {"HSDP_SECRET", "HSDP_SECRET_FILE"});
  ProcessOptions without_address = hosts();
  without_address.environment.erase("HSDP_ADDR");
  without_address.environment.erase("HSDP_PORT");
  expect_usage_error(without_address, {"HSDP_ADDR", "HSDP_PORT"});
  ProcessOptions masters = hosts();
  masters.environment["MASTER_ADDR"] = masters.environment["HSDP_ADDR"];
  masters.environment["MASTER_PORT"] = masters.environment["HSDP_PORT"];
  expect_usage_error(masters, {"MASTER_PORT"});
}

TEST_F(TcpRendezvousTest, ATakenPortIsAClearError) {
  const TakenPort taken(port_);
  taken.listen(1);
  const auto outcomes = run_processes(2, hosts(), [](int rank) {
    if (rank == 0) static_cast<void>(connect());
    return 0;
  });
  EXPECT_THAT(outcomes[0].error,
              AllOf(HasSubstr("HSDP_ADDR:HSDP_PORT"), HasSubstr(std::to_string(port_)),
                    HasSubstr("set HSDP_PORT to a free one")));
}

TEST_F(TcpRendezvousTest, AnAddressOfAnotherHostIsAClearError) {
  const auto outcomes = run_processes(2, hosts(), [](int rank) {
    ::setenv("HSDP_ADDR", "192.0.2.1", 1);  // reserved for documentation
    if (rank == 0) static_cast<void>(connect());
    return 0;
  });
  EXPECT_THAT(outcomes[0].error, HasSubstr("HSDP_ADDR is not an address of this host"));
}

// An idle stranger that stays connected is cut off, so that it holds no resources.
TEST_F(TcpRendezvousTest, AnIdleStrangerIsCutOff) {
  ProcessRanks ranks(2, hosts(), [](int rank) {
    while (rank == 1) ::pause();
    return try_to_connect(milliseconds(1'000));
  });
  const UniqueFd stranger = connect_to(port_);
  const auto begin = std::chrono::steady_clock::now();
  char byte = 0;
  EXPECT_LE(::recv(stranger.get(), &byte, 1, 0), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::duration<double>(kHangSeconds));
  EXPECT_TRUE(ranks.wait_for_end(0));
  ranks.signal(1, SIGKILL);
  static_cast<void>(ranks.finish());
}

}  // namespace
}  // namespace hsdp::comm
