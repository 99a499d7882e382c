// The Reducer between real processes: the same bits over shared memory and TCP, and errors instead
// of waits when a rank is killed or stopped in the middle of a step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <csignal>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/error.h"
#include "tests/support/process_ranks.h"
#include "tests/support/reducer_step.h"

namespace hsdp {
namespace {

using namespace hsdp::test;  // NOLINT(google-build-using-namespace): the test's own vocabulary
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr int kPeerLost = 11;
constexpr int kTimedOut = 12;

ProcessOptions options_for(const std::string& transport) {
  ProcessOptions options;
  options.environment["HSDP_TRANSPORT"] = transport;
  return options;
}

// FNV-1a over the bits of all arrays.
std::uint64_t hash_of(const std::vector<Values>& arrays) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const Values& values : arrays) {
    for (const float value : values) {
      hash = (hash ^ std::bit_cast<std::uint32_t>(value)) * 0x100000001b3U;
    }
  }
  return hash;
}

class SameBits : public testing::TestWithParam<MeshShape> {};

TEST_P(SameBits, OnEveryTransportAndBucketSize) {
  const MeshShape shape = GetParam();
  const StepCase step = random_step(odd_parameters(Dtype::kBf16), shape.size(),
                                    {Sync::kShard, Sync::kNone, Sync::kShard, Sync::kAll}, 8);
  const std::string want = std::to_string(hash_of(reference_results(step, {}, shape)));
  for (const std::string transport : {"auto", "tcp"}) {
    for (const std::int64_t bucket_bytes : {1 << 10, 1 << 20}) {
      const auto outcomes = run_processes(shape.size(), options_for(transport), [&](int) {
        const Mesh mesh =
            init_mesh({.replicate = shape.replicate, .shard = shape.shard, .timeout_s = 20.0});
        Reducer reducer(mesh, {.bucket_bytes = bucket_bytes});
        register_all(reducer, step);
        run_step(reducer, step, mesh.rank(), {.order = Order::kRandom, .thread_count = 2});
        note(std::to_string(hash_of(gathered(reducer, step))));
        note(reducer.stats().shard_transport);
        reducer.close();
        mesh.world().barrier();
        return 0;
      });
      std::set<std::string> transports;
      for (const RankOutcome& outcome : outcomes) {
        ASSERT_TRUE(outcome.ok()) << outcome.error;
        ASSERT_EQ(outcome.notes.size(), 2U);
        EXPECT_EQ(outcome.notes[0], want) << transport;
        transports.insert(outcome.notes[1]);
      }
      const Transport ran = transport == "tcp" ? Transport::kTcp : Transport::kSharedMemory;
      EXPECT_EQ(transports, std::set<std::string>{std::string(name(ran))});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, SameBits, testing::Values(MeshShape{2, 2}, MeshShape{1, 3}),
                         [](const auto& row) { return to_string(row.param); });

// Runs steps until one fails; notes what was thrown, which rank it names and when. `forks`: starts
// a child once the connections are made.
int run_until_error(MeshShape shape, double timeout_s, bool forks = false,
                    ShardOver over = ShardOver::kShard) {
  const StepCase step = random_step(odd_parameters(Dtype::kF32), shape.size(),
                                    {Sync::kShard, Sync::kNone, Sync::kAll}, 9);
  const Mesh mesh =
      init_mesh({.replicate = shape.replicate, .shard = shape.shard, .timeout_s = timeout_s});
  if (forks && ::fork() == 0) {
    ::pause();
    ::_exit(0);
  }
  Reducer reducer(mesh, {.bucket_bytes = 4 << 10, .shard_over = over});
  register_all(reducer, step);
  const auto noted = [](const RankError& error) {
    note(std::to_string(Clock::now().time_since_epoch().count()));
    note(error.what());
    for (const int rank : error.ranks()) note("at fault " + std::to_string(rank));
  };
  try {
    for (int i = 0;; ++i) {
      run_step(reducer, step, mesh.rank());
      if (i == 2) note("running");
    }
  } catch (const PeerLostError& error) {
    noted(error);
    return kPeerLost;
  } catch (const TimeoutError& error) {
    noted(error);
    return kTimedOut;
  }
}

// The notes are the time, the message and "at fault r". A rank that is a step behind the victim may
// not have noted "running".
void expect_verdict(const RankOutcome& outcome, int exit_code, int victim, Clock::time_point from,
                    std::chrono::milliseconds limit) {
  EXPECT_EQ(outcome.exit_code, exit_code) << outcome.error;
  std::vector<std::string> notes = outcome.notes;
  std::erase(notes, "running");
  ASSERT_EQ(notes.size(), 3U) << testing::PrintToString(notes);
  const Clock::time_point raised{Clock::duration(std::stoll(notes[0]))};
  EXPECT_LE(raised - from, limit) << notes[1];
  // What this rank was doing: a collective, a wait, or the call that found the world ended.
  EXPECT_THAT(notes[1], testing::Not(testing::StartsWith("world: ")));
  EXPECT_THAT(notes[1], HasSubstr("rank " + std::to_string(victim)));
  EXPECT_EQ(notes[2], "at fault " + std::to_string(victim));
}

struct Victim {
  MeshShape shape;
  std::string transport;
  int rank = 0;
  bool has_child = false;  // a child, such as a data loader, keeps the dead rank's sockets open
  ShardOver over = ShardOver::kShard;
};

void PrintTo(const Victim& victim, std::ostream* out) { *out << "rank " << victim.rank; }

class Killed : public testing::TestWithParam<Victim> {};

TEST_P(Killed, IsNamedByTheOthersWithinTwoSeconds) {
  const Victim& victim = GetParam();
  ProcessRanks ranks(victim.shape.size(), options_for(victim.transport), [&](int rank) {
    return run_until_error(victim.shape, 30.0, victim.has_child && rank == victim.rank,
                           victim.over);
  });
  ASSERT_TRUE(ranks.wait_for_note(victim.rank, "running"));
  const Clock::time_point killed = Clock::now();
  ranks.signal(victim.rank, SIGKILL);
  const std::vector<RankOutcome> outcomes = ranks.finish();
  for (int rank = 0; rank < victim.shape.size(); ++rank) {
    if (rank == victim.rank) continue;
    expect_verdict(outcomes[static_cast<std::size_t>(rank)], kPeerLost, victim.rank, killed,
                   within_two_seconds());
  }
}

class Stopped : public testing::TestWithParam<Victim> {};

TEST_P(Stopped, IsNamedAfterTheTimeoutAndRaisesTheSameWhenContinued) {
  const Victim& victim = GetParam();
  constexpr double kTimeoutSeconds = 1.5;
  ProcessRanks ranks(victim.shape.size(), options_for(victim.transport),
                     [&](int) { return run_until_error(victim.shape, kTimeoutSeconds); });
  ASSERT_TRUE(ranks.wait_for_note(victim.rank, "running"));
  const Clock::time_point stopped = Clock::now();
  ranks.signal(victim.rank, SIGSTOP);
  for (int rank = 0; rank < victim.shape.size(); ++rank) {
    if (rank == victim.rank) continue;
    EXPECT_TRUE(ranks.wait_for_note(rank, "at fault " + std::to_string(victim.rank)));
  }
  ranks.signal(victim.rank, SIGCONT);
  const std::vector<RankOutcome> outcomes = ranks.finish();
  for (int rank = 0; rank < victim.shape.size(); ++rank) {
    expect_verdict(outcomes[static_cast<std::size_t>(rank)], kTimedOut, victim.rank, stopped,
                   std::chrono::milliseconds(1'500) + 2 * within_two_seconds());
  }
}

std::string victim_name(const testing::TestParamInfo<Victim>& info) {
  return to_string(info.param.shape) + "_" + info.param.transport + "_rank_" +
         std::to_string(info.param.rank) + (info.param.has_child ? "_with_child" : "") +
         (info.param.over == ShardOver::kMesh ? "_over_mesh" : "");
}

INSTANTIATE_TEST_SUITE_P(Ranks, Killed,
                         testing::Values(Victim{kSquare, "auto", 0}, Victim{kSquare, "auto", 1},
                                         Victim{kSquare, "auto", 2}, Victim{kSquare, "auto", 3},
                                         Victim{kSquare, "tcp", 2}, Victim{{1, 3}, "tcp", 1},
                                         Victim{kSquare, "auto", 2, true},
                                         Victim{kSquare, "auto", 1, false, ShardOver::kMesh}),
                         victim_name);
// Each of these waits for a timeout.
INSTANTIATE_TEST_SUITE_P(Ranks, Stopped,
                         testing::Values(Victim{kSquare, "auto", 0}, Victim{kSquare, "auto", 3},
                                         Victim{{1, 3}, "tcp", 2}),
                         victim_name);

// A mistake on one rank is an error on the other rank at once, not after a timeout.
TEST(InitMesh, WithBadSizesOnOneRankIsAnErrorOnAll) {
  const auto outcomes = run_processes(2, {}, [](int rank) {
    Communicator job = connect_world();
    const auto told = [rank](const MeshOptions& bad, const std::string& begin,
                             const std::string& end) {
      if (rank == 0) {
        const auto error = caught<MismatchError>([] { const Mesh mesh = init_mesh({.shard = 2}); });
        return error && error->ranks() == std::vector<int>{1};
      }
      const auto error = caught<UsageError>([&] { const Mesh mesh = init_mesh(bad); });
      if (!error) return false;
      const std::string text = error->what();
      const std::size_t found = text.find(" (the job's size is ");
      return text.starts_with(begin) && text.substr(std::min(found, text.size())) == end;
    };
    const std::string source = " (the job's size is 2 by WORLD_SIZE of hsdp_run or torchrun)";
    if (!told({.replicate = 0, .shard = 2}, "mesh: expected replicate and", source)) return 1;
    // The sizes of a mesh over part of the job need not multiply to the job's size.
    if (!told({.replicate = 1, .shard = 3, .ranks = {{0, 1}}}, "mesh: ranks: ", "")) return 2;
    job.barrier();
    return 0;
  });
  for (const RankOutcome& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.error;
}

}  // namespace
}  // namespace hsdp
