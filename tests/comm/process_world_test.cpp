// The host engine between real processes, over memory and TCP: the contract, and ranks that are
// killed or stopped.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include "tests/comm/contract_suite.h"
#include "tests/comm/control_outcome.h"

namespace hsdp::test {
namespace {

TransportChoice transport_of(Path path) {
  return path == Path::kTcp ? TransportChoice::kTcp : TransportChoice::kAuto;
}

// Every process checks its own rank and prints what is wrong.
std::vector<ContractCase> process_cases() {
  constexpr int kSize = 3;  // threads have the other sizes
  std::vector<ContractCase> cases;
  for (const Path path : {Path::kDirect, Path::kPrivate, Path::kTcp}) {
    const auto run = [path](const std::function<void(Communicator&)>& body) {
      const auto outcomes = run_processes(kSize, {}, [&](int /*rank*/) {
        Communicator world = connect_world({.engine = "host", .transport = transport_of(path)});
        EXPECT_EQ(world.transport(),
                  path == Path::kTcp ? Transport::kTcp : Transport::kSharedMemory);
        body(world);
        return testing::Test::HasFailure() ? 1 : 0;
      });
      comm::expect_all_ok(outcomes);
    };
    cases.push_back({name(path), kSize, path, run});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Processes, Contract, testing::ValuesIn(process_cases()),
                         [](const auto& chosen) { return chosen.param.name; });

class KilledRank : public testing::TestWithParam<Path> {};

// A rank dies between or inside collectives that the others keep making.
TEST_P(KilledRank, IsNamedByTheOthersAtOnce) {
  ProcessRanks ranks(3, {}, [&](int /*rank*/) {
    Communicator world = connect_world({.engine = "host", .transport = transport_of(GetParam())});
    const Memory data(world, GetParam(), 200'000, Dtype::kF32);
    return comm::outcome_of([&] {
      for (int round = 0;; ++round) {
        world.all_reduce({.data = data.view(), .bucket = 4});
        if (round == 20) note("busy");
      }
    });
  });
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(ranks.wait_for_note(rank, "busy"));
  ranks.signal(1, SIGKILL);
  comm::expect_failure(ranks.finish(), {0, 2}, comm::kPeerLost,
                       {"rank 1 of 3", "all_reduce of bucket 4", "at fault 1"});
}

INSTANTIATE_TEST_SUITE_P(Host, KilledRank,
                         testing::Values(Path::kDirect, Path::kPrivate, Path::kTcp),
                         [](const auto& chosen) { return name(chosen.param); });

// Stops this process once its main thread sleeps and its beats have said what it waits for.
void stop_in_a_sleep() {
  const std::string path = "/proc/self/task/" + std::to_string(::getpid()) + "/stat";
  for (int asleep = 0; asleep < 40;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::ifstream file(path);
    std::string text;
    std::getline(file, text);
    asleep = text.compare(text.rfind(')'), 3, ") S") == 0 ? asleep + 1 : 0;
  }
  ::raise(SIGSTOP);
}

class SlowRank : public testing::TestWithParam<Path> {};

// A peer that has done its part may leave before a slow rank has noticed: no rank is lost.
TEST_P(SlowRank, IsNoReasonToEndTheWorldWhenAPeerLeaves) {
  ProcessRanks ranks(4, {}, [&](int rank) {
    Communicator world = connect_world({.engine = "host", .transport = transport_of(GetParam())});
    Communicator pair = world.split(rank < 2 ? 0 : 1, rank);
    world.barrier();
    std::thread stopper;
    if (rank == 2) stopper = std::thread(stop_in_a_sleep);
    if (rank == 3) ::raise(SIGSTOP);
    world.barrier();
    if (rank == 2) stopper.join();
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    for (bool goes_on = rank < 2; goes_on;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const bool over = std::chrono::steady_clock::now() >= end;
      goes_on = pair.exchange(over ? "over" : "on", "status")[0] == "on";
    }
    return 0;
  });
  for (const int rank : {2, 3}) ASSERT_TRUE(ranks.wait_until_stopped(rank));
  ranks.signal(3, SIGCONT);
  for (const int rank : {0, 1, 3}) EXPECT_TRUE(ranks.wait_for_end(rank));
  ranks.signal(2, SIGCONT);
  comm::expect_all_ok(ranks.finish());
}

INSTANTIATE_TEST_SUITE_P(Host, SlowRank, testing::Values(Path::kPrivate, Path::kTcp),
                         [](const auto& chosen) { return name(chosen.param); });

}  // namespace
}  // namespace hsdp::test
