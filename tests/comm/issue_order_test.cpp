// The order in which the lanes of a group issue what all of its ranks take part in.
#include "hsdp/comm/issue_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <latch>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "hsdp/comm/engine.h"
#include "hsdp/error.h"
#include "tests/comm/blames.h"
#include "tests/comm/rank_threads.h"
#include "tests/support/thread_ranks.h"

namespace hsdp::test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

bool never() { return false; }

// The lanes of a rank, and what they issue, in its order: "second 7" is the task of place 7 of the
// second lane.
class Lanes {
 public:
  Lanes(const Communicator& group, int count) : order_(IssueOrder::of(group)) {
    while (std::ssize(lanes_) < count) add(lanes_.size());
  }
  void add(std::size_t lane) {
    lanes_.resize(std::max(lanes_.size(), lane + 1));
    lanes_[lane] = order_->add_issuer();
  }
  // Waits for what it holds.
  void remove(std::size_t lane) { lanes_[lane].reset(); }
  [[nodiscard]] IssueOrder::Issuer& operator[](std::size_t lane) { return *lanes_[lane]; }

  void push(std::size_t lane, int place) {
    const auto run = [this, name = name_of(lane, place)] {
      const std::lock_guard lock(mutex_);
      issued_.push_back(name);
      changed_.notify_all();
    };
    lanes_[lane]->run_ordered({.run = run, .place = place, .skipped = never});
  }
  static std::string name_of(std::size_t lane, int place) {
    const std::string number = place == IssueOrder::kAfterBuckets ? "end" : std::to_string(place);
    return std::array{"first ", "second ", "third "}[lane] + number;
  }
  // Waits until there are so many, and forgets them.
  std::vector<std::string> take(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return issued_.size() >= count; });
    return std::exchange(issued_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> issued_;
  std::shared_ptr<IssueOrder> order_;
  std::vector<std::unique_ptr<IssueOrder::Issuer>> lanes_;
};

// What `body` returns is the same on all ranks, but for those that return nothing.
void expect_one_order(int size,
                      const std::function<std::vector<std::string>(Communicator&)>& body) {
  std::vector<std::vector<std::string>> orders(static_cast<std::size_t>(size));
  run_ranks(size, [&](Communicator& world) {
    orders[static_cast<std::size_t>(world.rank())] = body(world);
  });
  std::erase_if(orders, [](const auto& order) { return order.empty(); });
  EXPECT_GE(orders.size(), 3U);
  EXPECT_THAT(orders, Each(orders.back()));
}

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
    Lanes lanes(world, 1);
    const auto push_buckets = [&] {
      for (const int bucket : {1, 2, 3}) lanes.push(0, bucket);
    };
    if (world.rank() == 0) {
      push_buckets();
      lanes[0].stream().synchronize();
    }
    lanes.add(1);
    lanes.push(1, 0);
    if (world.rank() == 1) {
      lanes[1].stream().run([] {});  // the thread looks for work before the first lane has any
      push_buckets();
    }
    EXPECT_THAT(lanes.take(4), ElementsAre("first 1", "first 2", "first 3", "second 0"));
  });
}

// Rank 1 asks what comes next when rank 0 has nothing yet; a lane comes, and rank 0 names it before
// rank 1 may have noticed that it is there.
TEST(IssueOrder, TheFirstRankMayNameALaneAsSoonAsItHasIt) {
  constexpr int kRepeats = 300;
  run_ranks(2, [](Communicator& world) {
    Lanes lanes(world, 2);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      if (world.rank() == 1) lanes.push(0, 1);
      lanes.add(2);
      lanes.push(2, 0);
      if (world.rank() == 0) {
        ASSERT_THAT(lanes.take(1), ElementsAre("third 0")) << repeat;
        lanes.push(0, 1);
        ASSERT_THAT(lanes.take(1), ElementsAre("first 1")) << repeat;
      } else {
        ASSERT_THAT(lanes.take(2), ElementsAre("third 0", "first 1")) << repeat;
      }
      lanes.remove(2);
    }
  });
}

// Rounds of two lanes, in which another rank each time decides by its waits who comes first: a lane
// that is not ready there does not hold up the other, though its place is lower.
TEST(IssueOrder, LanesMayTakeTurnsAsAnyRankNeeds) {
  run_ranks(3, [](Communicator& world) {
    Lanes lanes(world, 2);
    for (int round = 0; round < 60; ++round) {
      const std::size_t leader = round % 2 == 1 ? 1 : 0;
      const std::size_t follower = 1 - leader;
      const bool decides = round % 3 == world.rank();
      if (!decides) lanes.push(follower, 0);
      lanes.push(leader, 1);
      std::vector<std::string> issued = lanes.take(decides ? 1 : 2);
      if (decides) {
        lanes.push(follower, 0);
        issued.push_back(lanes.take(1).front());
      }
      ASSERT_THAT(issued, ElementsAre(Lanes::name_of(leader, 1), Lanes::name_of(follower, 0)))
          << round;
    }
  });
}

// The first rank is another one than the world's, and ranks do not ascend.
TEST(IssueOrder, AGroupMayHaveItsOwnOrderOfRanks) {
  expect_one_order(4, [](Communicator& world) -> std::vector<std::string> {
    const Communicator group = world.split(world.rank() == 0 ? -1 : 0, -world.rank());
    if (world.rank() == 0) return {};
    Lanes lanes(group, 2);
    for (int bucket = 0; bucket < 20; ++bucket) {
      lanes.push(world.rank() == 2 ? 1 : 0, bucket);
      lanes.push(world.rank() == 2 ? 0 : 1, bucket);
    }
    return lanes.take(40);
  });
}

// Everything is there on every rank before a turn is given.
TEST(IssueOrder, ReadyTasksGoByPlaceThenByLaneInOneMessage) {
  std::vector<int> places(20);
  std::iota(places.begin(), places.end(), 0);
  places.push_back(IssueOrder::kAfterBuckets);
  std::vector<std::string> in_order;
  for (const int place : places) {
    for (const std::size_t lane : {0U, 1U}) in_order.push_back(Lanes::name_of(lane, place));
  }
  std::latch pushed(3);
  const auto counts = count_messages(3, [&](Communicator& world) {
    Lanes lanes(world, 2);
    lanes[0].stream().run([&] { pushed.wait(); });  // on the thread that issues
    for (const int place : places) {
      for (const std::size_t lane : {1U, 0U}) lanes.push(lane, place);
    }
    pushed.count_down();
    EXPECT_EQ(lanes.take(in_order.size()), in_order);
  });
  EXPECT_THAT(counts, ElementsAre(2, 1, 1));
}

TEST(IssueOrder, OneLaneAtATimeSendsNothing) {
  const auto counts = count_messages(2, [](Communicator& world) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      Lanes lanes(world, 1);
      for (int bucket = 0; bucket < 5; ++bucket) lanes.push(0, bucket);
      EXPECT_EQ(lanes.take(5).size(), 5U);
    }
  });
  EXPECT_THAT(counts, ElementsAre(0, 0));
}

TEST(IssueOrder, ALaneMayGoWhileOthersRun) {
  expect_one_order(3, [](Communicator& world) {
    Lanes lanes(world, 3);
    for (int bucket = 0; bucket < 50; ++bucket) {
      lanes.push(0, bucket);
      if (bucket < 20) lanes.push(1, bucket);
      if (bucket == 20 + world.rank()) lanes.remove(1);
      lanes.push(2, bucket);
    }
    return lanes.take(120);
  });
}

// The first task makes the ranks drop what they have of the next step: one rank has some of it,
// another none, and what comes after that is for all again.
TEST(IssueOrder, TasksThatAreSkippedCountOnNoRank) {
  expect_one_order(3, [](Communicator& world) {
    Lanes lanes(world, 2);
    for (int step = 0; step < 20; ++step) {
      std::atomic<bool> dropped{false};
      lanes[0].run_ordered({.run = [&] { dropped = true; },
                            .place = IssueOrder::kAfterBuckets,
                            .skipped = never,
                            .may_skip_later = true});
      for (int bucket = 0; bucket < world.rank(); ++bucket) {
        lanes[0].run_ordered(
            {.run = [] {}, .place = bucket, .skipped = [&] { return dropped.load(); }});
      }
      lanes.push(1, 0);
      lanes.push(0, 0);
      lanes[0].stream().synchronize();
    }
    return lanes.take(40);
  });
}

TEST(IssueOrder, ATaskThatARankNeverHasIsATimeoutThatNamesThatRank) {
  for (const int absent : {0, 1, 2}) {
    const auto body = [&](Communicator& world) {
      Lanes lanes(world, 2);
      if (world.rank() != absent) {
        lanes.push(1, 3);
        // Issued all the same: what it calls tells of the failure.
        EXPECT_THAT(lanes.take(1), ElementsAre("second 3"));
      }
      const comm::Control& control = world.engine()->control();
      const auto wait_for_failure = [&] {
        while (true) {
          control.throw_if_failed();
          std::this_thread::yield();
        }
      };
      EXPECT_THAT(wait_for_failure,
                  blames<TimeoutError>({absent}, {"issue order of bucket 3: rank "}));
    };
    run_ranks(3, body, {.timeout = std::chrono::milliseconds(300)});
  }
}

TEST(IssueOrder, AFailureOfTheWorldLetsEveryTaskRun) {
  std::latch have_lanes(2);
  run_ranks(2, [&](Communicator& world) {
    Lanes lanes(world, 2);
    have_lanes.arrive_and_wait();
    if (world.rank() == 0) return world.abort("the test wants it");
    lanes.push(0, 0);
    lanes.push(1, 0);
    lanes.push(1, 1);
    EXPECT_EQ(lanes.take(3).size(), 3U);
  });
}

}  // namespace
}  // namespace hsdp::test
