// The order in which the lanes of a group issue what all of its ranks take part in.
#include "hsdp/comm/issue_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/thread_ranks.h"

namespace hsdp::test {
namespace {

using ::testing::ElementsAre;
using Lane = std::unique_ptr<IssueOrder::Lane>;

// What a rank issued, in its order.
class Journal {
 public:
  void push(IssueOrder::Lane& lane, const std::string& name, int place) {
    lane.run_ordered(
        [this, name] {
          const std::lock_guard lock(mutex_);
          names_.push_back(name);
          changed_.notify_all();
        },
        place, [] { return false; });
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

// Rank 0 issued three buckets of its only lane before the second came; on rank 1 they come later
// than a bucket of the second lane, whose place is lower.
TEST(IssueOrder, WhatAnotherRankIssuedComesBeforeANewLane) {
  run_ranks(2, [](Communicator& world) {
    const auto order = IssueOrder::of(world);
    Journal journal;
    const Lane first = order->add_lane();
    const auto push_buckets = [&] {
      for (const int bucket : {1, 2, 3}) {
        journal.push(*first, "first " + std::to_string(bucket), bucket);
      }
    };
    if (world.rank() == 0) {
      push_buckets();
      first->stream().synchronize();
    }
    const Lane second = order->add_lane();
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
    const Lane first = order->add_lane();
    const Lane second = order->add_lane();
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      Journal journal;
      if (world.rank() == 1) journal.push(*first, "first", 1);
      const Lane third = order->add_lane();
      journal.push(*third, "third", 0);
      if (world.rank() == 0) {
        static_cast<void>(journal.when_there_are(1));
        journal.push(*first, "first", 1);
      }
      ASSERT_THAT(journal.when_there_are(2), ElementsAre("third", "first")) << repeat;
    }
  });
}

}  // namespace
}  // namespace hsdp::test
