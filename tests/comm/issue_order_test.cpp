// The order in which the lanes of a group issue what all of its ranks take part in.
#include "hsdp/comm/issue_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <latch>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
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

  void push(std::size_t lane, int place, bool ends_step = false) {
    const auto run = [this, name = name_of(lane, place)] {
      const std::lock_guard lock(mutex_);
      issued_.push_back(name);
      changed_.notify_all();
    };
    lanes_[lane]->run_ordered(
        {.run = run, .place = place, .skipped = never, .ends_step = ends_step});
  }
  static std::string name_of(std::size_t lane, int place) {
    const std::string number = place == IssueOrder::kAfterBuckets ? "end" : std::to_string(place);
    return std::array{"first ", "second ", "third ", "fourth "}[lane] + number;
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
  void post(std::string_view key, std::span<const int> members, const comm::Saying& mine) override {
    const bool agrees = key.find("/issue/") != std::string_view::npos;
    if (agrees && key.find("/issue/lane/") == std::string_view::npos) ++count_;
    StageControl::post(key, members, mine);
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

// Rank 2 needs a task of all ranks, which the others have not issued yet when they add a lane,
// before it does so itself.
TEST(IssueOrder, ARankMayNeedTheOthersBeforeItAddsALane) {
  for (const std::size_t lane_count : {1U, 2U}) {
    std::latch together(3);
    run_ranks(
        3,
        [&](Communicator& world) {
          Lanes lanes(world, static_cast<int>(lane_count));
          if (world.rank() != 2) {
            lanes[0].stream().run(
                [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
          }
          lanes[0].run_ordered({.run = [&] { together.arrive_and_wait(); }, .skipped = never});
          if (world.rank() == 2) together.wait();
          lanes.add(lane_count);
          lanes.push(lane_count, 0);
          lanes.take(1);
        },
        {.timeout = std::chrono::seconds(10)});
  }
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

// Gathers of the second lane beside buckets of the first.
void push_step(Lanes& lanes, int buckets) {
  for (int unit = 0; unit < 3; ++unit) lanes.push(1, IssueOrder::kAfterBuckets);
  for (int bucket = 0; bucket < buckets; ++bucket) lanes.push(0, bucket);
  lanes.push(0, IssueOrder::kAfterBuckets, true);
}

TEST(IssueOrder, StepsThatRepeatThemselvesSendNothing) {
  IssueOrder::record_turns(true);
  constexpr int kSize = 3;
  const auto controls = comm::in_process_control(kSize, std::chrono::seconds(30));
  std::array<std::atomic<int>, kSize> counts{};
  std::array<std::array<int, 2>, kSize> sent{};  // until step 200, and until the end
  std::latch done(kSize);
  run_each(kSize, [&](std::size_t r) {
    Communicator world = comm::host_world(std::make_shared<CountingControl>(controls[r], counts[r]),
                                          TransportChoice::kAuto);
    Lanes lanes(world, 2);
    for (int step = 0; step < 400; ++step) {
      push_step(lanes, 5);
      lanes.take(9);
      if (step == 200) sent[r][0] = counts[r];
    }
    sent[r][1] = counts[r];
    done.arrive_and_wait();  // a rank whose lanes go says so
  });
  for (const auto& [early, late] : sent) EXPECT_EQ(early, late);
  IssueOrder::record_turns(false);
}

// By holes, by a lane that comes, and by one that goes.
TEST(IssueOrder, ARecordEndsOnAllRanksWhereItDoesNotHold) {
  IssueOrder::record_turns(true);
  expect_one_order(3, [](Communicator& world) {
    Lanes lanes(world, 2);
    std::size_t count = 0;
    for (int step = 0; step < 40; ++step) {
      const int buckets = step == 12 ? 2 : 5;
      push_step(lanes, buckets);
      count += static_cast<std::size_t>(buckets) + 4;
      if (step == 20) lanes.add(2);
      if (step == 30) lanes.remove(2);
      if (step >= 20 && step < 30) {
        lanes.push(2, 1);
        ++count;
      }
      if (step % 2 == world.rank() % 2) lanes[0].stream().synchronize();
    }
    return lanes.take(count);
  });
  IssueOrder::record_turns(false);
}

// One rank alone waits for the end of a step that leaves a lane out. The others are far ahead then:
// that lane's tasks of the next step must not be taken for those of this one.
TEST(IssueOrder, AStepThatLeavesALaneOutEndsBeforeTheNextOne) {
  IssueOrder::record_turns(true);
  expect_one_order(3, [](Communicator& world) {
    Lanes lanes(world, 2);
    std::vector<std::string> all;
    std::size_t pending = 0;
    const auto take_all = [&] {
      for (std::string& name : lanes.take(std::exchange(pending, 0)))
        all.push_back(std::move(name));
    };
    for (int step = 0; step < 30; ++step) {
      for (int bucket = 0; bucket < 3; ++bucket) lanes.push(0, bucket);
      if (step % 10 != 9) lanes.push(1, 3);
      lanes.push(0, IssueOrder::kAfterBuckets, true);
      pending += step % 10 != 9 ? 5 : 4;
      if (world.rank() == step / 10 && step % 10 > 6) take_all();
    }
    take_all();
    return all;
  });
  IssueOrder::record_turns(false);
}

// Two lanes that end steps, one after the other, as two Reducers do. Now and then one rank alone
// waits for either end.
TEST(IssueOrder, ARankMayWaitForEitherEndOfAStep) {
  IssueOrder::record_turns(true);
  expect_one_order(3, [](Communicator& world) {
    Lanes lanes(world, 2);
    std::vector<std::string> all;
    std::size_t pending = 0;
    for (int step = 0; step < 60; ++step) {
      for (const std::size_t lane : {0U, 1U}) {
        for (int bucket = 0; bucket < 2; ++bucket) lanes.push(lane, bucket);
        lanes.push(lane, IssueOrder::kAfterBuckets, true);
        pending += 3;
        const bool waits = step % 10 == 5 + static_cast<int>(lane) && world.rank() == step / 10 % 3;
        if (!waits) continue;
        for (std::string& name : lanes.take(std::exchange(pending, 0))) {
          all.push_back(std::move(name));
        }
      }
    }
    for (std::string& name : lanes.take(pending)) all.push_back(std::move(name));
    return all;
  });
  IssueOrder::record_turns(false);
}

// A program that repeats itself and now and then changes on all ranks. What it pushes after a wait
// may depend on what was issued before; for the end of a step some ranks wait, and others do not.
std::vector<std::string> run_program(Communicator& world, std::uint64_t seed) {
  std::mt19937 common(static_cast<unsigned>(seed));
  std::mt19937 own(static_cast<unsigned>(seed * 7 + static_cast<std::uint64_t>(world.rank())));
  const auto below = [](std::mt19937& random, int limit) {
    return static_cast<int>(random() % static_cast<unsigned>(limit));
  };
  struct Push {
    std::size_t lane = 0;
    int place = 0;
  };
  std::vector<std::vector<Push>> phases;
  std::vector<std::string> all;
  int lane_count = 1 + below(common, 4);
  Lanes lanes(world, lane_count);
  std::size_t pending = 0;
  const auto wait = [&] {
    for (std::string& name : lanes.take(std::exchange(pending, 0))) all.push_back(std::move(name));
  };
  for (int step = 0; step < 16; ++step) {
    const bool changes = step == 0 || below(common, 8) == 0;
    if (changes && step > 0 && below(common, 2) == 0) {
      wait();
      if (lane_count > 1 && below(common, 2) == 0) {
        lanes.remove(static_cast<std::size_t>(--lane_count));
      }
      if (lane_count < 4 && below(common, 2) == 0) {
        lanes.add(static_cast<std::size_t>(lane_count++));
      }
      phases.clear();
    }
    if (changes) {
      phases.clear();
      for (int n = 1 + below(common, 3); n > 0; --n) {
        std::vector<Push>& phase = phases.emplace_back();
        for (int p = below(common, 6); p > 0; --p) {
          phase.push_back({static_cast<std::size_t>(below(common, lane_count)), below(common, 4)});
        }
      }
    }
    const bool has_holes = below(common, 8) == 0;
    const auto left_out = static_cast<std::size_t>(below(common, 4 * lane_count));
    const bool waits = below(common, 2) == 0;
    for (const std::vector<Push>& phase : phases) {
      std::vector<std::vector<Push>> by_lane(static_cast<std::size_t>(lane_count));
      for (const Push& push : phase) {
        if (push.lane == left_out || (has_holes && below(common, 3) == 0)) continue;
        by_lane[push.lane].push_back(push);
        ++pending;
      }
      // Lanes in another order on each rank.
      const std::size_t first = own() % by_lane.size();
      for (std::size_t i = 0; i < by_lane.size(); ++i) {
        for (const Push& push : by_lane[(first + i) % by_lane.size()]) {
          lanes.push(push.lane, push.place);
        }
        if (below(own, 4) == 0) std::this_thread::yield();
      }
      if (waits) wait();
    }
    lanes.push(0, IssueOrder::kAfterBuckets, true);
    ++pending;
    if (below(own, 3) == 0) wait();
  }
  wait();
  return all;
}

// With and without a patience that is too short: then ranks stop when others are ahead of them.
TEST(IssueOrder, RandomProgramsHaveOneOrder) {
  const int count =
      std::getenv("HSDP_SEEDS") != nullptr ? std::atoi(std::getenv("HSDP_SEEDS")) : 300;
  for (int seed = 0; seed < count; ++seed) {
    IssueOrder::record_turns(true,
                             std::chrono::microseconds(seed % 20 == 0 ? 100'000 : seed % 3 * 50));
    SCOPED_TRACE(seed);
    expect_one_order(3, [seed](Communicator& world) {
      return run_program(world, static_cast<std::uint64_t>(seed));
    });
  }
  IssueOrder::record_turns(false);
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
