// Control with ranks as threads: what differs from processes, whose tests cover the rest.
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hsdp/comm/world.h"
#include "hsdp/error.h"
#include "tests/comm/rank_threads.h"

namespace hsdp::comm {
namespace {

constexpr std::chrono::milliseconds kTimeout{20'000};
const WaitState kWaiting{.operation = "test"};

// Both ranks tell while they hold a lock that their listeners also take.
TEST(ThreadControl, ListenersMayLockAndAnswerWhateverTheTellerHolds) {
  constexpr int kMessages = 500;
  const auto controls = in_process_control(2, kTimeout);
  std::mutex mutexes[2];
  std::promise<void> heard[2];
  int counts[2] = {};
  std::vector<std::shared_ptr<void>> listening;
  for (const int rank : {0, 1}) {
    const auto at = static_cast<std::size_t>(rank);
    listening.push_back(controls[at]->listen("topic", [&, rank, at](int from, std::string_view) {
      const std::lock_guard lock(mutexes[rank]);
      if (++counts[rank] <= kMessages) controls[at]->tell(from, "topic", "answer");
      if (counts[rank] == 2 * kMessages) heard[rank].set_value();
    }));
  }
  test::run_each(2, [&](std::size_t at) {
    for (int number = 0; number < kMessages; ++number) {
      const std::lock_guard lock(mutexes[at]);
      controls[at]->tell(1 - static_cast<int>(at), "topic", "first");
    }
  });
  for (std::promise<void>& all : heard) {
    EXPECT_EQ(all.get_future().wait_for(kTimeout), std::future_status::ready);
  }
}

TEST(ThreadControl, AnAnswerComesBehindWhatWasToldBefore) {
  const auto controls = in_process_control(2, kTimeout);
  const std::vector<int> both{0, 1};
  std::atomic<int> heard = 0;
  const auto listening = controls[1]->listen("topic", [&](int, std::string_view) { ++heard; });
  test::run_each(2, [&](std::size_t rank) {
    for (int round = 1; round <= 300; ++round) {
      if (rank == 0) controls[0]->tell(1, "topic", "");
      static_cast<void>(controls[rank]->exchange(std::to_string(round), both, "", kWaiting));
      EXPECT_TRUE(rank == 0 || heard == round) << heard << " in round " << round;
      static_cast<void>(controls[rank]->exchange(std::to_string(-round), both, "", kWaiting));
    }
  });
}

TEST(ThreadControl, AListenerMayHoldTheLastControl) {
  std::promise<void> alone;
  std::promise<void> gone;
  std::shared_ptr<void> watched(nullptr, [&](void*) { gone.set_value(); });
  auto controls = in_process_control(2, kTimeout);
  auto holder = std::make_shared<std::shared_ptr<Control>>(controls[1]);
  auto listening = std::make_shared<std::shared_ptr<void>>();
  *listening = controls[1]->listen("end", [=, &alone](int, std::string_view) mutable {
    alone.get_future().wait();
    holder->reset();
    listening->reset();
    watched.reset();
  });
  listening.reset();
  watched.reset();
  controls.pop_back();
  controls[0]->tell(1, "end", "");
  controls.clear();
  alone.set_value();
  EXPECT_EQ(gone.get_future().wait_for(kTimeout), std::future_status::ready);
}

// As when a process closes its world: no rank waits for the timeout.
TEST(ThreadControl, ARankThatIsGoneIsLostToThoseWhoWaitForIt) {
  auto controls = in_process_control(3, kTimeout);
  controls.pop_back();
  const std::vector<int> all{0, 1, 2};
  for (const auto& control : controls) {
    try {
      static_cast<void>(control->exchange("word", all, "", kWaiting));
      ADD_FAILURE() << "an answer";
    } catch (const PeerLostError& error) {
      EXPECT_EQ(error.ranks(), std::vector<int>{2});
      EXPECT_NE(std::string(error.what()).find("it closed its world"), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace hsdp::comm
