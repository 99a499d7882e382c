// Control between real processes of one host: exchanges, descriptors, and every way to fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "hsdp/comm/control/control_frames.h"
#include "tests/comm/control_outcome.h"

namespace hsdp::comm {
namespace {

TEST_F(ControlTest, ExchangesReachEveryMemberInRankOrder) {
  for (const int size : {1, 2, 3, 5}) {
    expect_all_ok(run_processes(size, {}, [size](int rank) {
      const auto control = connect();
      if (control->rank() != rank || control->size() != size) return 1;
      for (int round = 0; round < 50; ++round) {
        const auto answers = control->exchange("round " + std::to_string(round), everyone(size),
                                               std::to_string(rank * 100 + round), {"test"});
        if (static_cast<int>(answers.size()) != size) return 2;
        for (int peer = 0; peer < size; ++peer) {
          if (answers[static_cast<std::size_t>(peer)] != std::to_string(peer * 100 + round)) {
            return 3;
          }
        }
      }
      return 0;
    }));
  }
}

TEST_F(ControlTest, GroupsWithoutRankZeroExchangeToo) {
  expect_all_ok(run_processes(4, {}, [](int rank) {
    const auto control = connect(milliseconds(20'000));
    const std::vector<int> group = rank % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3};
    // Posts a message long before it is collected; the message is large and all zero bytes.
    const std::string message(1 << 20, '\0');
    control->post("late", group, message_to_all(message + std::to_string(rank)));
    const auto early = control->exchange("early", group, std::to_string(rank), {"test"});
    const auto late = control->collect("late", group, {"test"}).messages(group);
    const auto peer = static_cast<std::size_t>(rank < 2 ? 1 : 0);
    const std::string expected = std::to_string(rank < 2 ? rank + 2 : rank - 2);
    return early[peer] == expected && late[peer] == message + expected ? 0 : 1;
  }));
}

TEST_F(ControlTest, WhatARankTellsAnotherArrivesInOrderThereAndNowhereElse) {
  constexpr int kMessages = 200;
  expect_all_ok(run_processes(3, {}, [](int rank) {
    const auto control = connect(milliseconds(20'000));
    std::mutex mutex;
    std::condition_variable changed;
    std::map<int, std::vector<std::string>> heard;
    auto listening = control->listen("topic", [&](int from, std::string_view message) {
      const std::lock_guard lock(mutex);
      heard[from].emplace_back(message);
      changed.notify_all();
    });
    static_cast<void>(control->exchange("all listen", everyone(3), "", {"test"}));
    for (int number = 0; number < kMessages; ++number) {
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == rank) continue;
        control->tell(peer, "nobody's", "lost");
        control->tell(peer, "topic", std::to_string(rank) + std::to_string(number));
      }
    }
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] {
        return heard.size() == 2 && heard.begin()->second.size() >= kMessages &&
               heard.rbegin()->second.size() >= kMessages;
      });
    }
    // All messages have come, and the answer to this exchange would come after any that were sent
    // later.
    static_cast<void>(control->exchange("all heard", everyone(3), "", {"test"}));
    listening.reset();
    for (const auto& [from, messages] : heard) {
      if (from == rank || messages.size() != kMessages) return 1;
      for (int number = 0; number < kMessages; ++number) {
        const auto place = static_cast<std::size_t>(number);
        if (messages[place] != std::to_string(from) + std::to_string(number)) return 2;
      }
    }
    for (const int nobody : {rank, -1, 3}) {
      if (!is_refused([&] { control->tell(nobody, "topic", ""); })) return 3;
    }
    // A relay needs room for the sender's rank.
    const std::string longest(kMaxFrameBytes - 32, 'x');
    if (!is_refused([&] { control->tell((rank + 1) % 3, "topic", longest); })) return 4;
    return 0;
  }));
}

// On each link, one end has received to the byte what the other has sent.
TEST_F(ControlTest, CountsWhatGoesOverEachLink) {
  constexpr int kSize = 4;
  constexpr int kRounds = 5;
  const auto outcomes = run_processes(kSize, {}, [](int rank) {
    const auto control = connect();
    std::string message = "first";
    const auto sent_to_zero = [&] {
      const ControlLinkStats link = control->links().front();
      return std::pair(link.sent_count, link.sent_bytes);
    };
    static_cast<void>(control->exchange("first", everyone(kSize), message, {"test"}));
    const auto before = sent_to_zero();
    for (int round = 0; round < kRounds; ++round) {
      message.assign(1000, 'x');
      const std::string key = "round " + std::to_string(round);
      static_cast<void>(control->exchange(key, everyone(kSize), message, {"test"}));
    }
    const auto after = sent_to_zero();
    if (rank != 0) {
      if (after.first - before.first != kRounds) return 1;
      const std::int64_t bytes = after.second - before.second;
      if (bytes < kRounds * 1000 || bytes > kRounds * 1100) return 2;
    }
    for (const ControlLinkStats& link : control->links()) {
      // Rank 0 may have received more by now, as the other ranks continue.
      const std::int64_t to_peer = rank == 0 ? link.sent_bytes : link.received_bytes;
      const std::int64_t count = rank == 0 ? link.sent_count : link.received_count;
      note(std::to_string(std::max(rank, link.peer)) + ": " + std::to_string(count) + " in " +
           std::to_string(to_peer));
    }
    static_cast<void>(control->exchange("noted", everyone(kSize), "", {"test"}));
    return 0;
  });
  expect_all_ok(outcomes);
  ASSERT_EQ(outcomes[0].notes.size(), kSize - 1U);
  for (std::size_t rank = 1; rank < kSize; ++rank) {
    EXPECT_THAT(outcomes[rank].notes, testing::ElementsAre(outcomes[0].notes[rank - 1]));
  }
}

TEST_F(ControlTest, DescriptorsReachTheMembers) {
  expect_all_ok(run_processes(4, {}, [](int rank) {
    const auto control = connect();
    for (int peer = 0; peer < 4; ++peer) {
      if (!control->shares_memory_with(peer)) return 1;
    }
    for (const std::vector<int>& group : {std::vector<int>{0, 1, 2, 3}, {1, 2, 3}, {1, 3}}) {
      if (std::ranges::count(group, rank) == 0) continue;
      if (!descriptors_pass(*control, group)) return 2;
    }
    return 0;
  }));
}

TEST_F(ControlTest, EveryRankSharesOneSecret) {
  const auto outcomes = run_processes(3, {}, [](int) {
    const auto control = connect();
    note(control->secret());
    return control->secret().size() >= 32 ? 0 : 1;
  });
  for (const auto& outcome : outcomes) {
    EXPECT_TRUE(outcome.ok());
    EXPECT_EQ(outcome.notes, outcomes[0].notes);
  }
}

TEST_F(ControlTest, MisuseIsAnErrorAtOnce) {
  expect_all_ok(run_processes(2, {.deadline = milliseconds(120'000)}, [](int rank) {
    const auto control = connect(milliseconds(100'000));
    const std::vector<std::vector<int>> wrong_groups{{}, {1 - rank}, {0, 1, 2}, {0, 0, 1}};
    for (const auto& group : wrong_groups) {
      if (!is_refused([&] { control->post("key", group, {}); })) return 1;
      if (!is_refused([&] { static_cast<void>(control->collect("key", group, {"test"})); })) {
        return 2;
      }
    }
    const std::string huge(33U << 20U, 'x');
    if (!is_refused([&] { control->post("huge", everyone(2), message_to_all(huge)); })) return 3;
    // The largest message that fits, after all of these.
    const std::string large(30U << 20U, 'x');
    const auto answers = control->exchange("large", everyone(2), large, {"test"});
    return answers[0] == large && answers[1] == large ? 0 : 4;
  }));
}

TEST_F(ControlTest, RanksThatGoOneByOneDisturbNobody) {
  expect_all_ok(run_processes(4, {}, [](int rank) {
    auto control = connect();
    for (int last = 0; last < 3; ++last) {
      // Rank 0 leaves first, while the others still talk through it.
      if (rank == last) return 0;
      std::vector<int> rest;
      for (int peer = last + 1; peer < 4; ++peer) rest.push_back(peer);
      static_cast<void>(control->exchange("step", rest, "", {"test"}));
    }
    return control->failed() ? 1 : 0;
  }));
}

}  // namespace
}  // namespace hsdp::comm
