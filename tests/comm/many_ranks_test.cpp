// Hundreds of ranks that join at once, while strangers connect, and that leave at once.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/comm/tcp_door.h"

namespace hsdp::comm {
namespace {

class ManyRanksTest : public ControlTest {};

constexpr milliseconds kLong{60'000};

// Ranks wait in it until all are there, so that they come at the same moment.
class Gate {
 public:
  Gate() {
    if (::pipe2(ends_.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void wait() {
    note("at the gate");
    open();  // this process's end
    char byte = 0;
    static_cast<void>(::read(ends_[0], &byte, 1));
  }
  void open() {
    if (ends_[1] >= 0) ::close(std::exchange(ends_[1], -1));
  }

 private:
  std::array<int, 2> ends_{-1, -1};
};

std::vector<RankOutcome> run_at_once(int size, ProcessOptions options,
                                     const std::function<int(int)>& run) {
  Gate gate;
  options.deadline = kLong;
  ProcessRanks ranks(size, std::move(options), [&](int rank) {
    gate.wait();
    return run(rank);
  });
  for (int rank = 0; rank < size; ++rank) EXPECT_TRUE(ranks.wait_for_note(rank, "at the gate"));
  gate.open();
  return ranks.finish();
}

int join_and_say_one_word(int size) {
  return outcome_of([size] {
    const auto control = connect(kLong);
    static_cast<void>(control->exchange("word", everyone(size), "", {"test"}));
  });
}

// One failure stands for all.
void expect_none_lost(const std::vector<RankOutcome>& outcomes) {
  const auto lost = std::ranges::find_if_not(outcomes, &RankOutcome::ok);
  EXPECT_EQ(std::ranges::count_if(outcomes, &RankOutcome::ok), std::ssize(outcomes));
  if (lost != outcomes.end()) expect_all_ok({*lost});
}

TEST_F(ManyRanksTest, FourHundredMeetAtOnce) {
  constexpr int kSize = 400;
  for (const auto& options : {ProcessOptions{}, ranks_on_hosts(free_port())}) {
    expect_none_lost(run_at_once(kSize, options, [](int) { return join_and_say_one_word(kSize); }));
  }
}

// Keeps `count` silent connections open, and replaces each one that is cut.
[[noreturn]] void besiege(int port, std::size_t count) {
  std::vector<UniqueFd> strangers;
  while (strangers.size() < count) strangers.push_back(connect_to(port));
  note("at the door");
  for (;;) {
    std::vector<pollfd> ends;
    for (const UniqueFd& stranger : strangers) ends.push_back({stranger.get(), POLLIN, 0});
    ::poll(ends.data(), ends.size(), -1);
    for (std::size_t i = 0; i < count; ++i) {
      if (ends[i].revents != 0) strangers[i] = connect_to(port);
    }
  }
}

TEST_F(ManyRanksTest, SilentStrangersLoseNobody) {
  constexpr int kSize = 128;
  const int port = free_port();
  ProcessOptions options = ranks_on_hosts(port);
  options.deadline = kLong;
  ProcessRanks ranks(kSize, options, [](int rank) {
    if (rank != 0) ::raise(SIGSTOP);
    return join_and_say_one_word(kSize);
  });
  ProcessRanks strangers(1, {.deadline = kLong}, [port](int) -> int { besiege(port, 200); });
  ASSERT_TRUE(strangers.wait_for_note(0, "at the door"));
  for (int rank = 1; rank < kSize; ++rank) ASSERT_TRUE(ranks.wait_until_stopped(rank));
  for (int rank = 1; rank < kSize; ++rank) ranks.signal(rank, SIGCONT);
  expect_none_lost(ranks.finish());
}

// A rank's last collective has everything it waits for, although peers have left since.
TEST_F(ManyRanksTest, NobodyReportsALostPeerWhenAllLeaveAtOnce) {
  for (const auto& [transport, size] :
       {std::pair(TransportChoice::kAuto, 128), std::pair(TransportChoice::kTcp, 32)}) {
    SCOPED_TRACE(::testing::Message() << size << " ranks");
    expect_none_lost(run_processes(size, {.deadline = kLong}, [transport = transport](int) {
      return outcome_of([transport] {
        Communicator world = connect_world({.timeout = kLong, .transport = transport});
        static_cast<void>(world.exchange("the last word", "status"));
        world.barrier();
      });
    }));
  }
}

}  // namespace
}  // namespace hsdp::comm
