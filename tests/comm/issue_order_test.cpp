// The order in which the lanes of a group issue what all of its ranks take part in.
#include "hsdp/comm/issue_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <latch>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/comm/engine.h"
#include "hsdp/error.h"
#include "tests/comm/rank_threads.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Issuer = std::unique_ptr<IssueOrder::Issuer>;

bool never() { return false; }

// What a rank issued, in its order.
class Journal {
 public:
  void push(IssueOrder::Issuer& lane, const std::string& name, int place) {
    lane.run_ordered({.run = [this, name] { write(name); }, .place = place, .skipped = never});
  }
  void write(const std::string& name) {
    const std::lock_guard lock(mutex_);
    names_.push_back(name);
    changed_.notify_all();
  }
  std::vector<std::string> when_there_are(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return names_.size() >= count; });
    return names_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> names_;
};

// Counts the messages by which lanes agree.
class CountingControl : public StageControl {
 public:
  CountingControl(std::shared_ptr<comm::Control> inner, std::atomic<int>& count)
      : StageControl(std::move(inner), {}), count_(count) {}
  void post(std::string_view key, std::span<const int> members, std::string_view message) override {
    const bool agrees = key.find("/issue/") != std::string_view::npos;
    if (agrees && key.find("/issue/lane/") == std::string_view::npos) ++count_;
    StageControl::post(key, members, message);
  }
  void tell(int peer, std::string_view topic, std::string_view message) override {
    ++count_;
    StageControl::tell(peer, topic, message);
  }

 private:
  std::atomic<int>& count_;
};

// run_ranks() that returns how many such messages each rank sent.
std::vector<int> count_messages(int size, const RankBody& body) {
  const auto controls = comm::in_process_control(size, std::chrono::seconds(30));
  std::vector<std::atomic<int>> counts(controls.size());
  run_each(controls.size(), [&](std::size_t r) {
    Communicator world = comm::host_world(std::make_shared<CountingControl>(controls[r], counts[r]),
                                          TransportChoice::kAuto);
    body(world);
  });
  return {counts.begin(), counts.end()};
}

// Rank 0 issued three buckets of its only lane before the second came; on rank 1 they come later
// than a bucket of the second lane, whose place is lower.
TEST(IssueOrder, WhatAnotherRankIssuedComesBeforeANewLane) {
  run_ranks(2, [](Communicator& world) {
    const auto order = IssueOrder::of(world);
    Journal journal;
    const Issuer first = order->add_issuer();
    const auto push_buckets = [&] {
      for (const int bucket : {1, 2, 3}) {
        journal.push(*first, "first " + std::to_string(bucket), bucket);
      }
    };
    if (world.rank() == 0) {
      push_buckets();
      first->stream().synchronize();
    }
    const Issuer second = order->add_issuer();
    journal.push(*second, "second 0", 0);
    if (world.rank() == 1) {
      second->stream().run([] {});  // the thread looks for work before the first lane has any
      push_buckets();
    }
    EXPECT_THAT(journal.when_there_are(4),
                ElementsAre("first 1", "first 2", "first 3", "second 0"));
  });
}

// Rank 1 asks what comes next when rank 0 has nothing yet; a lane comes, and rank 0 names it before
// rank 1 may have noticed that it is there.
TEST(IssueOrder, TheFirstRankMayNameALaneAsSoonAsItHasIt) {
  constexpr int kRepeats = 300;
  run_ranks(2, [](Communicator& world) {
    const auto order = IssueOrder::of(world);
    const Issuer first = order->add_issuer();
    const Issuer second = order->add_issuer();
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      Journal journal;
      if (world.rank() == 1) journal.push(*first, "first", 1);
      const Issuer third = order->add_issuer();
      journal.push(*third, "third", 0);
      if (world.rank() == 0) {
        static_cast<void>(journal.when_there_are(1));
        journal.push(*first, "first", 1);
      }
      ASSERT_THAT(journal.when_there_are(2), ElementsAre("third", "first")) << repeat;
    }
  });
}

// One rank finishes with a lane before it has anything for the other, which the first rank of the
// mesh would take first.
TEST(IssueOrder, ATaskThatIsNotReadyOnEveryRankHoldsUpNoOtherLane) {
  for (const int late_rank : {0, 1, 2}) {
    run_ranks(3, [&](Communicator& world) {
      const auto order = IssueOrder::of(world);
      Journal journal;
      const Issuer first = order->add_issuer();
      const Issuer second = order->add_issuer();
      const bool late = world.rank() == late_rank;
      if (!late) journal.push(*first, "first", 0);
      journal.push(*second, "second", 7);
      if (late) {
        EXPECT_THAT(journal.when_there_are(1), ElementsAre("second"));
        journal.push(*first, "first", 0);
      }
      EXPECT_THAT(journal.when_there_are(2), ElementsAre("second", "first")) << late_rank;
    });
  }
}

// Rounds of two lanes, in which another rank each time decides by its waits who comes first.
TEST(IssueOrder, LanesMayTakeTurnsAsAnyRankNeeds) {
  constexpr int kRounds = 60;
  std::vector<std::vector<std::string>> journals(3);
  run_ranks(3, [&](Communicator& world) {
    const auto order = IssueOrder::of(world);
    Journal journal;
    const Issuer first = order->add_issuer();
    const Issuer second = order->add_issuer();
    for (int round = 0; round < kRounds; ++round) {
      const std::string number = std::to_string(round);
      const bool second_leads = round % 2 == 1;
      IssueOrder::Issuer& leader = second_leads ? *second : *first;
      IssueOrder::Issuer& follower = second_leads ? *first : *second;
      const std::size_t before = 2 * static_cast<std::size_t>(round);
      if (round % 3 != world.rank()) journal.push(follower, "follower " + number, 0);
      journal.push(leader, "leader " + number, 1);
      if (round % 3 == world.rank()) {
        static_cast<void>(journal.when_there_are(before + 1));
        journal.push(follower, "follower " + number, 0);
      }
      static_cast<void>(journal.when_there_are(before + 2));
    }
    journals[static_cast<std::size_t>(world.rank())] = journal.when_there_are(2 * kRounds);
  });
  for (int round = 0; round < kRounds; ++round) {
    const auto place = 2 * static_cast<std::size_t>(round);
    EXPECT_EQ(journals[0][place], "leader " + std::to_string(round));
  }
  EXPECT_EQ(journals[1], journals[0]);
  EXPECT_EQ(journals[2], journals[0]);
}

// The first rank is another one than the world's, and ranks do not ascend.
TEST(IssueOrder, AGroupMayHaveItsOwnOrderOfRanks) {
  std::vector<std::vector<std::string>> journals(4);
  run_ranks(4, [&](Communicator& world) {
    const Communicator group = world.split(world.rank() == 0 ? -1 : 0, -world.rank());
    if (world.rank() == 0) return;
    const auto order = IssueOrder::of(group);
    Journal journal;
    const Issuer first = order->add_issuer();
    const Issuer second = order->add_issuer();
    for (int bucket = 0; bucket < 20; ++bucket) {
      IssueOrder::Issuer& one = world.rank() == 2 ? *second : *first;
      IssueOrder::Issuer& other = world.rank() == 2 ? *first : *second;
      journal.push(one, &one == first.get() ? "first" : "second", bucket);
      journal.push(other, &other == first.get() ? "first" : "second", bucket);
    }
    journals[static_cast<std::size_t>(world.rank())] = journal.when_there_are(40);
  });
  EXPECT_EQ(journals[2], journals[1]);
  EXPECT_EQ(journals[3], journals[1]);
}

// Everything is there on every rank before a turn is given.
TEST(IssueOrder, ReadyTasksGoByPlaceThenByLaneInOneMessage) {
  constexpr int kPlaces = 20;
  std::vector<std::string> in_order;
  for (int place = 0; place < kPlaces; ++place) {
    in_order.push_back("first " + std::to_string(place));
    in_order.push_back("second " + std::to_string(place));
  }
  in_order.insert(in_order.end(), {"first end", "second end"});
  std::latch pushed(3);
  const auto counts = count_messages(3, [&](Communicator& world) {
    const auto order = IssueOrder::of(world);
    Journal journal;
    const Issuer first = order->add_issuer();
    const Issuer second = order->add_issuer();
    first->stream().run([&] { pushed.wait(); });  // on the thread that issues
    for (int place = 0; place < kPlaces; ++place) {
      journal.push(*second, "second " + std::to_string(place), place);
      journal.push(*first, "first " + std::to_string(place), place);
    }
    journal.push(*second, "second end", IssueOrder::kAfterBuckets);
    journal.push(*first, "first end", IssueOrder::kAfterBuckets);
    pushed.count_down();
    EXPECT_EQ(journal.when_there_are(in_order.size()), in_order);
  });
  EXPECT_THAT(counts, ElementsAre(2, 1, 1));
}

TEST(IssueOrder, OneLaneAtATimeSendsNothing) {
  const auto counts = count_messages(2, [](Communicator& world) {
    const auto order = IssueOrder::of(world);
    for (int repeat = 0; repeat < 3; ++repeat) {
      Journal journal;
      const Issuer lane = order->add_issuer();
      for (int bucket = 0; bucket < 5; ++bucket) journal.push(*lane, "bucket", bucket);
      EXPECT_EQ(journal.when_there_are(5).size(), 5U);
    }
  });
  EXPECT_THAT(counts, ElementsAre(0, 0));
}

TEST(IssueOrder, ALaneMayGoWhileOthersRun) {
  std::vector<std::vector<std::string>> journals(3);
  run_ranks(3, [&](Communicator& world) {
    const auto order = IssueOrder::of(world);
    Journal journal;
    const Issuer first = order->add_issuer();
    Issuer second = order->add_issuer();
    const Issuer third = order->add_issuer();
    for (int bucket = 0; bucket < 50; ++bucket) {
      journal.push(*first, "first", bucket);
      if (bucket < 20) journal.push(*second, "second", bucket);
      if (bucket == 20 + world.rank()) second.reset();  // waits for what it holds
      journal.push(*third, "third", bucket);
    }
    journals[static_cast<std::size_t>(world.rank())] = journal.when_there_are(120);
  });
  EXPECT_EQ(journals[1], journals[0]);
  EXPECT_EQ(journals[2], journals[0]);
}

// The first task makes the ranks drop what they have of the next step: one rank has some of it,
// another none, and what comes after that is for all again.
TEST(IssueOrder, TasksThatAreSkippedCountOnNoRank) {
  std::vector<std::vector<std::string>> journals(3);
  run_ranks(3, [&](Communicator& world) {
    const auto order = IssueOrder::of(world);
    Journal journal;
    const Issuer first = order->add_issuer();
    const Issuer second = order->add_issuer();
    for (int step = 0; step < 20; ++step) {
      std::atomic<bool> dropped{false};
      first->run_ordered({.run = [&] { dropped = true; },
                          .place = IssueOrder::kAfterBuckets,
                          .skipped = never,
                          .may_skip_later = true});
      for (int bucket = 0; bucket < world.rank(); ++bucket) {
        first->run_ordered(
            {.run = [] {}, .place = bucket, .skipped = [&] { return dropped.load(); }});
      }
      journal.push(*second, "second", 0);
      journal.push(*first, "first", 0);
      first->stream().synchronize();
    }
    journals[static_cast<std::size_t>(world.rank())] = journal.when_there_are(40);
  });
  EXPECT_EQ(journals[1], journals[0]);
  EXPECT_EQ(journals[2], journals[0]);
}

TEST(IssueOrder, ATaskThatARankNeverHasIsATimeoutThatNamesThatRank) {
  for (const int absent : {0, 1, 2}) {
    run_ranks(3,
              [&](Communicator& world) {
                const auto order = IssueOrder::of(world);
                Journal journal;
                const Issuer first = order->add_issuer();
                const Issuer second = order->add_issuer();
                if (world.rank() != absent) {
                  journal.push(*second, "second", 3);
                  // Issued all the same: what it calls tells of the failure.
                  EXPECT_THAT(journal.when_there_are(1), ElementsAre("second"));
                }
                const comm::Control& control = world.engine()->control();
                const auto error = caught<TimeoutError>([&] {
                  while (true) {
                    control.throw_if_failed();
                    std::this_thread::yield();
                  }
                });
                ASSERT_TRUE(error);
                EXPECT_THAT(error->what(), HasSubstr("issue order of bucket 3: rank "));
                EXPECT_THAT(error->ranks(), ElementsAre(absent));
              },
              {.timeout = std::chrono::milliseconds(300)});
  }
}

TEST(IssueOrder, AFailureOfTheWorldLetsEveryTaskRun) {
  std::latch have_lanes(2);
  run_ranks(2, [&](Communicator& world) {
    const auto order = IssueOrder::of(world);
    Journal journal;
    const Issuer first = order->add_issuer();
    const Issuer second = order->add_issuer();
    have_lanes.arrive_and_wait();
    if (world.rank() == 0) return world.abort("the test wants it");
    journal.push(*first, "first", 0);
    journal.push(*second, "second", 0);
    journal.push(*second, "third", 1);
    EXPECT_EQ(journal.when_there_are(3).size(), 3U);
  });
}

}  // namespace
}  // namespace hsdp::test
