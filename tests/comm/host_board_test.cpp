// Meetings of many ranks on a board: no rank passes before all have come, one ring wakes all, a
// wait names the missing rank, and the end of the world releases every rank.
#include "hsdp/comm/host/host_board.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "hsdp/comm/world.h"
#include "hsdp/error.h"
#include "tests/comm/rank_threads.h"
#include "tests/comm/stage_control.h"

namespace hsdp::test {
namespace {

using comm::GroupLines;
using comm::HostBoard;
using comm::RankLines;
using comm::WaitState;

constexpr WaitState kWaiting{.operation = "all_reduce"};

// Remembers the peer that the rank's last announced wait named.
class RecordingControl : public StageControl {
 public:
  explicit RecordingControl(std::shared_ptr<comm::Control> inner)
      : StageControl(std::move(inner), {}) {}
  [[nodiscard]] int begin_wait(WaitState state) override {
    awaited_.store(state.peer);
    return StageControl::begin_wait(state);
  }
  [[nodiscard]] int awaited() const { return awaited_.load(); }

 private:
  std::atomic<int> awaited_{-2};
};

// The boards of one group, each used by one thread.
class Boards {
 public:
  // World ranks are group ranks plus `first_rank`.
  explicit Boards(std::size_t size, int first_rank = 0) : lines_(size) {
    std::vector<RankLines*> lines;
    for (RankLines& line : lines_) lines.push_back(&line);
    std::vector<int> members(size);
    std::iota(members.begin(), members.end(), first_rank);
    for (const auto& control : comm::in_process_control(static_cast<int>(size), kTimeout)) {
      controls_.push_back(std::make_unique<RecordingControl>(control));
      boards_.push_back(std::make_unique<HostBoard>(
          group_, lines, members, static_cast<int>(boards_.size()), *controls_.back()));
    }
  }
  [[nodiscard]] std::size_t size() const { return lines_.size(); }
  [[nodiscard]] HostBoard& operator[](std::size_t rank) { return *boards_[rank]; }
  [[nodiscard]] RecordingControl& control(std::size_t rank) { return *controls_[rank]; }
  [[nodiscard]] std::uint32_t rings() const { return group_.bell.rings.load(); }
  void wait_until_asleep(std::size_t ranks) const {
    while (group_.bell.sleepers.load() != ranks) std::this_thread::yield();
  }

 private:
  static constexpr std::chrono::milliseconds kTimeout{60'000};
  GroupLines group_{};
  std::vector<RankLines> lines_;
  std::vector<std::unique_ptr<RecordingControl>> controls_;
  std::vector<std::unique_ptr<HostBoard>> boards_;
};

class Meetings : public testing::TestWithParam<int> {
 protected:
  Boards boards_{static_cast<std::size_t>(GetParam())};
};

// After a meeting every rank reads what another one wrote before it. The memory is plain, so that
// ThreadSanitizer checks the order too.
TEST_P(Meetings, NobodyPassesBeforeAllHaveCome) {
  const int rounds = 2'000;
  std::vector<int> written(boards_.size());
  run_each(boards_.size(), [&](std::size_t rank) {
    HostBoard& board = boards_[rank];
    for (int round = 1; round <= rounds; ++round) {
      written[rank] = round;
      board.arrive();
      board.wait_arrived(kWaiting);
      const std::size_t other = (rank + static_cast<std::size_t>(round)) % written.size();
      ASSERT_EQ(written[other], round);
      board.arrive();
      board.wait_arrived(kWaiting);
    }
  });
}

TEST_P(Meetings, EveryPostIsReadByAllHoweverFastTheNextFollows) {
  const int rounds = 2'000;
  run_each(boards_.size(), [&](std::size_t rank) {
    for (int round = 1; round <= rounds; ++round) {
      const auto calls =
          boards_[rank].post({.count = round, .terms = rank, .bucket = round % 7}, kWaiting);
      for (std::size_t r = 0; r < calls.size(); ++r) {
        ASSERT_EQ(calls[r].count, round);
        ASSERT_EQ(calls[r].terms, r);
        ASSERT_EQ(calls[r].bucket, round % 7);
      }
    }
  });
}

// As in a broadcast: only one rank waits for the end; the others may already be in the next call.
TEST_P(Meetings, AnEndIsAwaitedByWhoNeedsItOnly) {
  const int rounds = 1'000;
  std::vector<int> done(boards_.size());
  run_each(boards_.size(), [&](std::size_t rank) {
    HostBoard& board = boards_[rank];
    for (int round = 1; round <= rounds; ++round) {
      const std::size_t root = static_cast<std::size_t>(round) % done.size();
      static_cast<void>(board.post({.root = static_cast<int>(root)}, kWaiting));
      done[rank] = round;
      board.finish(false);
      if (rank != root) continue;
      ASSERT_FALSE(board.wait_finished(kWaiting));
      for (const int one : done) ASSERT_EQ(one, round);
    }
  });
}

TEST_P(Meetings, WhatIsNotFiniteIsKnownToAllInItsOwnCallOnly) {
  const int rounds = 1'000;
  run_each(boards_.size(), [&](std::size_t rank) {
    HostBoard& board = boards_[rank];
    for (int round = 1; round <= rounds; ++round) {
      static_cast<void>(board.post({}, kWaiting));
      const bool some = round % 3 != 0;
      board.finish(some && rank == static_cast<std::size_t>(round) % boards_.size());
      ASSERT_EQ(board.wait_finished(kWaiting), some);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Meetings, testing::Values(3, 64));

// Each rank comes once all ranks before it sleep. Each time only the last one rings, and only once.
TEST(Waking, OneRingWakesAllAndOnlyTheLastOneRings) {
  Boards boards(24);
  std::barrier between(static_cast<std::ptrdiff_t>(boards.size()));
  run_each(boards.size(), [&](std::size_t rank) {
    for (std::uint32_t meeting = 0; meeting < 10; ++meeting) {
      between.arrive_and_wait();
      boards.wait_until_asleep(rank);
      EXPECT_EQ(boards.rings(), meeting);
      boards[rank].arrive();
      boards[rank].wait_arrived(kWaiting);
      EXPECT_EQ(boards.rings(), meeting + 1);
      between.arrive_and_wait();
    }
  });
}

TEST(Waking, NobodyRingsWhereNobodySleeps) {
  Boards boards(8);
  for (std::size_t rank = 0; rank < boards.size(); ++rank) boards[rank].arrive();
  for (std::size_t rank = 0; rank < boards.size(); ++rank) boards[rank].wait_arrived(kWaiting);
  EXPECT_EQ(boards.rings(), 0U);
}

TEST(Waking, ASleeperNamesWhoIsMissing) {
  constexpr std::chrono::seconds kLimit{20};
  Boards boards(12, 100);
  run_each(boards.size(), [&](std::size_t rank) {
    for (std::size_t late = 0; late < boards.size(); ++late) {
      const auto end = std::chrono::steady_clock::now() + kLimit;
      for (std::size_t r = 0; rank == late && r < boards.size(); ++r) {
        // A sleeper looks again from time to time and then knows which ranks have come.
        const int named = 100 + static_cast<int>(late);
        while (r != late && boards.control(r).awaited() != named) {
          std::this_thread::yield();
          if (std::chrono::steady_clock::now() < end) continue;
          ADD_FAILURE() << "rank " << r << " names " << boards.control(r).awaited();
          break;
        }
      }
      boards[rank].arrive();
      boards[rank].wait_arrived(kWaiting);
    }
  });
}

TEST(Waking, AnEndOfTheWorldReachesAllSleepers) {
  Boards boards(64);
  std::atomic<int> told{0};
  run_each(boards.size(), [&](std::size_t rank) {
    if (rank == 5) {  // never comes
      boards.wait_until_asleep(boards.size() - 1);
      boards.control(rank).fail({comm::FailureKind::kPeerLost, "rank 5 of 64 is gone", {5}});
      return;
    }
    boards[rank].arrive();
    try {
      boards[rank].wait_arrived(kWaiting);
      ADD_FAILURE() << "rank " << rank << " passed";
    } catch (const PeerLostError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("rank 5 of 64 is gone"));
      EXPECT_EQ(error.ranks(), std::vector<int>{5});
      ++told;
    }
  });
  EXPECT_EQ(told.load(), 63);
}

}  // namespace
}  // namespace hsdp::test
