// What goes wrong in a task of a lane is told, whoever runs it.
#include "hsdp/reducer/lane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>

#include "hsdp/comm/world.h"

namespace hsdp::reducer {
namespace {

using testing::ThrowsMessage;

[[noreturn]] void fail_in_task() { throw std::runtime_error("of the task"); }

struct OneRank {
  Communicator world = in_process_world(1).front();
  Outcome outcome{world};
};

class LaneErrors : public testing::TestWithParam<bool> {};

// A thread that dropped its tasks without a word would leave everybody waiting for them.
TEST_P(LaneErrors, FailTheReducer) {
  OneRank rank;
  const bool is_gpu = GetParam();  // whose tasks are the mesh's, which orders them
  Lane lane(
      "lane", {}, rank.outcome,
      is_gpu ? IssueOrder::of(rank.world)->add_issuer() : std::shared_ptr<IssueOrder::Issuer>());
  lane.issue({.run = fail_in_task});
  bool ran = false;
  lane.issue({.run = [&ran] { ran = true; }});
  lane.synchronize();
  EXPECT_TRUE(ran);
  EXPECT_TRUE(rank.outcome.failed());
  EXPECT_THAT([&] { rank.outcome.rethrow_failure("test"); },
              ThrowsMessage<std::runtime_error>("of the task"));
}

INSTANTIATE_TEST_SUITE_P(Threads, LaneErrors, testing::Bool(),
                         [](const auto& test) { return test.param ? "OfTheMesh" : "OfTheLane"; });

}  // namespace
}  // namespace hsdp::reducer
