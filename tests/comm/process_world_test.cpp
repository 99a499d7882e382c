// The host engine between real processes: the same bits as between threads, over memory and TCP.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include "hsdp/error.h"
#include "tests/comm/collective_bits.h"
#include "tests/comm/rank_threads.h"
#include "tests/support/process_ranks.h"

namespace hsdp::test {
namespace {

using testing::HasSubstr;

std::string bits_between_threads(int size, Path path) {
  std::vector<std::uint64_t> bits(static_cast<std::size_t>(size));
  run_world({.size = size, .path = path}, [&](Communicator& world) {
    bits[static_cast<std::size_t>(world.rank())] = hash_of_collectives(world, path);
  });
  for (const std::uint64_t rank_bits : bits) EXPECT_EQ(rank_bits, bits[0]);
  return std::to_string(bits[0]);
}

std::vector<std::string> bits_between_processes(int size, TransportChoice transport,
                                                Transport expected) {
  const auto outcomes = run_processes(size, {}, [&](int /*rank*/) {
    Communicator world = connect_world({.engine = "host", .transport = transport});
    if (world.transport() != expected) note("transport " + std::string(name(world.transport())));
    note(std::to_string(hash_of_collectives(world, Path::kDirect)));
    note(std::to_string(hash_of_collectives(world, Path::kPrivate)));
    return 0;
  });
  std::vector<std::string> bits;
  for (const RankOutcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.ok()) << outcome.error;
    bits.insert(bits.end(), outcome.notes.begin(), outcome.notes.end());
  }
  return bits;
}

class Processes : public testing::TestWithParam<int> {};

TEST_P(Processes, GivesTheSameBitsOnEveryPath) {
  const int size = GetParam();
  // Processes first: a test forks before it starts threads.
  auto all = bits_between_processes(size, TransportChoice::kAuto, Transport::kSharedMemory);
  const auto tcp = bits_between_processes(size, TransportChoice::kTcp, Transport::kTcp);
  all.insert(all.end(), tcp.begin(), tcp.end());
  EXPECT_EQ(all.size(), static_cast<std::size_t>(size) * 4);
  for (const Path path : {Path::kDirect, Path::kPrivate, Path::kTcp, Path::kMixed}) {
    all.push_back(bits_between_threads(size, path));
  }
  EXPECT_THAT(all, testing::Each(all.front()));
}

INSTANTIATE_TEST_SUITE_P(Host, Processes, testing::Values(2, 3, 4));

TEST(ProcessWorlds, AMismatchIsNamedByAllBeforeAnyDataMoves) {
  const auto outcomes = run_processes(3, {}, [](int rank) {
    Communicator world = connect_world({.engine = "host"});
    std::vector<float> data(1'000, 1.0F);
    try {
      world.all_reduce(TensorView{data.data(), rank == 2 ? 10 : 1'000});
      note("no error");
    } catch (const MismatchError& error) {
      note(error.what());
      if (error.ranks() != std::vector<int>{2}) note("blames another");
    }
    if (data != std::vector<float>(1'000, 1.0F)) note("data changed");
    return 0;
  });
  for (const RankOutcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.ok()) << outcome.error;
    ASSERT_EQ(outcome.notes.size(), 1U);
    EXPECT_THAT(outcome.notes[0], testing::AllOf(HasSubstr("all_reduce of 1000 f32 (ranks 0, 1)"),
                                                 HasSubstr("all_reduce of 10 f32 (rank 2)")));
  }
}

// A process that is watched twice costs rank 0 of a large host a descriptor more per rank.
TEST(ProcessWorlds, RankZeroWatchesEachProcessOnce) {
  const auto outcomes = run_processes(4, {}, [](int rank) {
    const Communicator world = connect_world({.engine = "host"});
    if (rank != 0) return 0;
    int watched = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;  // the directory's own descriptor
      const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
      watched += target.find("pidfd") != std::string::npos ? 1 : 0;
    }
    note(std::to_string(watched));
    return 0;
  });
  for (const RankOutcome& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.error;
  EXPECT_THAT(outcomes[0].notes, testing::ElementsAre("3"));
}

class KilledRank : public testing::TestWithParam<Path> {};

// A rank dies between, or inside, collectives that the others keep on making.
TEST_P(KilledRank, IsNamedByTheOthersAtOnce) {
  const bool tcp = GetParam() == Path::kTcp;
  ProcessRanks ranks(3, {}, [&](int /*rank*/) {
    Communicator world = connect_world(
        {.engine = "host", .transport = tcp ? TransportChoice::kTcp : TransportChoice::kAuto});
    const Memory data(world, GetParam(), 200'000, Dtype::kF32);
    try {
      for (int round = 0;; ++round) {
        world.all_reduce({.data = data.view(), .bucket = 4});
        if (round == 20) note("busy");
      }
    } catch (const PeerLostError& error) {
      note(error.what());
      if (error.ranks() != std::vector<int>{1}) note("blames another");
    }
    return 0;
  });
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(ranks.wait_for_note(rank, "busy"));
  ranks.signal(1, SIGKILL);
  const auto killed = std::chrono::steady_clock::now();
  const auto outcomes = ranks.finish();
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(15));
  for (const int rank : {0, 2}) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(outcome.ok()) << outcome.error;
    ASSERT_EQ(outcome.notes.size(), 2U);
    EXPECT_THAT(outcome.notes[1], HasSubstr("rank 1 of 3"));
    EXPECT_THAT(outcome.notes[1], HasSubstr("all_reduce of bucket 4"));
  }
}

INSTANTIATE_TEST_SUITE_P(Host, KilledRank,
                         testing::Values(Path::kDirect, Path::kPrivate, Path::kTcp),
                         [](const auto& chosen) { return name(chosen.param); });

// Stops this process once its main thread sleeps, and its beats have told for what.
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

class SlowRank : public testing::TestWithParam<TransportChoice> {};

// A peer that did its part may leave before a slow rank has seen it: nobody is lost.
TEST_P(SlowRank, IsNoReasonToEndTheWorldWhenAPeerLeaves) {
  ProcessRanks ranks(4, {}, [&](int rank) {
    Communicator world = connect_world({.engine = "host", .transport = GetParam()});
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
  for (const RankOutcome& outcome : ranks.finish()) EXPECT_TRUE(outcome.ok()) << outcome.error;
}

INSTANTIATE_TEST_SUITE_P(Host, SlowRank,
                         testing::Values(TransportChoice::kAuto, TransportChoice::kTcp),
                         [](const auto& chosen) {
                           return chosen.param == TransportChoice::kTcp ? "Tcp" : "SharedMemory";
                         });

}  // namespace
}  // namespace hsdp::test
