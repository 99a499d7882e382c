// Which ranks waited for which, when one rank comes late.
#include "hsdp/wait_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "hsdp/comm/operation_record.h"
#include "hsdp/error.h"
#include "hsdp/reducer/compare_waits.h"
#include "hsdp/reducer_internal.h"
#include "tests/support/reducer_step.h"
#include "tests/support/written_operations.h"

namespace hsdp::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

constexpr int kSteps = 3;
constexpr std::chrono::milliseconds kDelay{150};  // longer than a busy machine holds up all ranks

StepCase waited_step(MeshShape shape, std::vector<Sync> schedule = {Sync::kShard, Sync::kAll}) {
  return random_step(odd_parameters(Dtype::kF32), shape.size(), std::move(schedule), 7);
}

// The rank that comes late to each step.
WaitTable table_of(const Mesh& mesh, const StepCase& step, int late) {
  Reducer reducer(mesh);
  register_all(reducer, step);
  for (int i = 0; i < kSteps; ++i) {
    if (mesh.rank() == late) std::this_thread::sleep_for(kDelay);
    static_cast<void>(run_step(reducer, step, mesh.rank()));
  }
  return reducer.wait_table();
}

double total(const WaitTable& table, int awaited) {
  double seconds = 0;
  for (const WaitTable::Wait& wait : table.waits) {
    if (wait.awaited == awaited) seconds += wait.seconds;
  }
  return seconds;
}

void expect_named(const WaitTable& table, MeshShape shape, int late) {
  ASSERT_EQ(table.straggler, late) << table.text();
  EXPECT_GT(total(table, late), 0.5 * kSteps * std::chrono::duration<double>(kDelay).count());
  EXPECT_LT(table.clock_error_s, std::chrono::duration<double>(kDelay).count() / 2);
  for (const WaitTable::Wait& wait : table.waits) {
    EXPECT_NE(wait.waiting, wait.awaited);
    EXPECT_GE(wait.seconds, table.clock_error_s);
    EXPECT_TRUE(wait.waiting >= 0 && wait.waiting < shape.size());
  }
  EXPECT_THAT(table.text(),
              AllOf(HasSubstr("rank " + std::to_string(late) + " was waited for "),
                    MatchesRegex(".* was waited for [0-9.]+ s by [0-9]+ ranks? in [0-9]+ "
                                 "operations, 3 steps, [0-9.]+ s .clock error [0-9.]+ ms.*")));
}

TEST(WaitTable, NamesTheRankThatComesLate) {
  for (const int late : {0, 2, 3}) {
    std::vector<WaitTable> tables(4);
    run_mesh(kSquare, [&](const Mesh& mesh) {
      tables[static_cast<std::size_t>(mesh.rank())] = table_of(mesh, waited_step(kSquare), late);
    });
    for (const WaitTable& table : tables) {
      expect_named(table, kSquare, late);
      EXPECT_EQ(table.text(), tables[0].text());
      EXPECT_EQ(table.operations, tables[0].operations);
    }
  }
}

// Rank 3 comes late to its replica hops with rank 1 because it has waited for rank 2.
TEST(WaitTable, FollowsAChainOfWaitsToItsBeginning) {
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const WaitTable table = table_of(mesh, waited_step(kSquare, {Sync::kAll}), 2);
    const double delay_s = std::chrono::duration<double>(kDelay).count();
    for (const WaitTable::Wait& wait : table.waits) {
      if (wait.awaited != 2) {
        EXPECT_LT(wait.seconds, delay_s);
      }
    }
    EXPECT_GT(total(table, 2), 3 * delay_s);  // all others waited
  });
}

TEST(WaitTable, ComparesEveryOperationOfEveryGroupOnce) {
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const StepCase step = waited_step(kSquare);
    Reducer reducer(mesh, {.bucket_bytes = 4 << 10});
    register_all(reducer, step);
    static_cast<void>(run_step(reducer, step, mesh.rank()));
    const std::int64_t buckets = reducer.stats().bucket_count;
    EXPECT_GT(buckets, 1);
    // Two microbatches in two shard groups, the last one's replica hop in two replicate groups.
    EXPECT_EQ(reducer.wait_table().operations, 2 * 2 * buckets + 2 * buckets + 2);
  });
}

TEST(WaitTable, NamesNobodyWhereNothingWasCompared) {
  run_mesh(kSquare, [](const Mesh& mesh) {
    Reducer reducer(mesh);
    const WaitTable table = reducer.wait_table();
    EXPECT_EQ(table.operations, 0);
    EXPECT_EQ(table.straggler, std::nullopt);
    EXPECT_THAT(table.text(), HasSubstr("no rank was waited for in 0 operations"));
  });
  run_mesh({.replicate = 1, .shard = 1}, [](const Mesh& mesh) {
    EXPECT_EQ(table_of(mesh, waited_step({.replicate = 1, .shard = 1}), 0).operations, 0);
  });
}

// The table does not mix in the operations of another Reducer of the same name.
TEST(WaitTable, ComparesTheOperationsOfItsReducer) {
  run_mesh({.replicate = 1, .shard = 2}, [](const Mesh& mesh) {
    const StepCase step = waited_step({.replicate = 1, .shard = 2});
    for (int made = 0; made < 2; ++made) {
      Reducer one(mesh);
      Reducer other(mesh);
      for (Reducer* const reducer : {&one, &other}) {
        register_all(*reducer, step);
        static_cast<void>(run_step(*reducer, step, mesh.rank()));
      }
      static_cast<void>(run_step(other, step, mesh.rank()));
      EXPECT_EQ(one.wait_table().operations, 2 * one.stats().bucket_count + 2);
      EXPECT_EQ(one.wait_table().steps, 1);
      EXPECT_EQ(other.wait_table().operations, 2 * (2 * one.stats().bucket_count + 2));
      EXPECT_EQ(other.wait_table().steps, 2);
    }
  });
}

WaitTable table_of(WrittenOperations& written) {
  return reducer::compare_waits(ReducerInternal(written.reducer()).groups(),
                                [&] { return written.now_s(); });
}

TEST(WaitTable, ComparesRanksWhoseClocksAreApart) {
  const double start_s = Operations::now_s();
  run_mesh(kSquare, [&](const Mesh& mesh) {
    const double ahead_s = mesh.rank() == 2 ? -7 : 5 * mesh.rank();
    WrittenOperations written(mesh, {.start_s = start_s, .ahead_s = ahead_s});
    for (int step = 0; step < 3; ++step) {
      const double at_s = 0.1 * step - 1;
      written.write_word(step, mesh.rank() == 2 ? at_s + 0.06 : at_s, at_s + 0.061);
    }
    const WaitTable table = table_of(written);
    EXPECT_EQ(table.straggler, 2);
    EXPECT_EQ(table.operations, 3);
    EXPECT_EQ(table.steps, 3);
    EXPECT_LT(table.clock_error_s, 0.03);
    EXPECT_NEAR(table.span_s, 0.26, 2 * table.clock_error_s);
    EXPECT_NEAR(total(table, 2), 9 * 0.06, 9 * table.clock_error_s);
    EXPECT_EQ(table.waits.size(), 3U);
    EXPECT_EQ(table.unexplained_s, 0);
  });
}

// The clocks agree now; they were 96 ms apart.
TEST(WaitTable, BlamesNoRankForTheDriftOfItsClock) {
  const double start_s = Operations::now_s();
  for (const bool is_late : {false, true}) {
    run_mesh(kSquare, [&](const Mesh& mesh) {
      const double drift = mesh.rank() == 1 ? 80e-6 : mesh.rank() == 3 ? -80e-6 : 0;
      WrittenOperations written(mesh, {.start_s = start_s, .drift = drift});
      written.write_word(0, is_late && mesh.rank() == 2 ? -599 : -600, -598);
      const WaitTable table = table_of(written);
      EXPECT_EQ(table.operations, 1);
      EXPECT_NEAR(table.clock_error_s, 0.12, 0.03);
      EXPECT_EQ(table.straggler, is_late ? std::optional(2) : std::nullopt) << table.text();
      EXPECT_NEAR(total(table, 2), is_late ? 3 : 0, 3 * 0.05);
    });
  }
}

// Rank 3 is late with a word after an operation that only its record has.
TEST(WaitTable, LeavesUnexplainedWhatMayBeAnotherRanksFault) {
  const double start_s = Operations::now_s();
  run_mesh(kSquare, [&](const Mesh& mesh) {
    WrittenOperations written(mesh, {.start_s = start_s});
    if (mesh.rank() == 3) written.write({.kind = OperationKind::kShardHop, .index = 0}, -1.8, -1.1);
    written.write_word(0, mesh.rank() == 3 ? -1 : -2, -0.9);
    const WaitTable table = table_of(written);
    EXPECT_EQ(table.operations, 1);
    EXPECT_NEAR(table.unexplained_s, 3 * 0.7, 0.05);
    EXPECT_NEAR(total(table, 3), 3 * 0.3, 0.05);
    EXPECT_THAT(table.text(), HasSubstr(" s of waits unexplained)"));
  });
}

// The record no longer tells what the rank did before its oldest operation.
TEST(WaitTable, LeavesUnexplainedWhatHasBeenOverwritten) {
  const double start_s = Operations::now_s();
  run_mesh(kSquare, [&](const Mesh& mesh) {
    WrittenOperations written(mesh, {.start_s = start_s});
    for (std::size_t i = 0; mesh.rank() == 3 && i < OperationRecord::kCapacity; ++i) {
      written.write({.kind = OperationKind::kWait}, -1.4, -1.39);
    }
    written.write_word(0, mesh.rank() == 3 ? -1 : -2, -0.9);
    const WaitTable table = table_of(written);
    EXPECT_EQ(table.operations, 1);
    EXPECT_NEAR(table.unexplained_s, 3 * 0.6, 0.05);
    EXPECT_NEAR(total(table, 3), 3 * 0.4, 0.05);
  });
}

using reducer::kUnknownRank;
using reducer::RankWait;
using reducer::WaitShares;
using Waits = std::map<int, std::vector<RankWait>>;

// As share_waits(), but looks at every wait of the awaited rank.
void scan_all(const Waits& waits, std::int64_t error_ns, int waiting, const RankWait& wait,
              int links, WaitShares& shares) {
  std::int64_t from_ns = wait.from_ns;
  for (const RankWait& one : waits.at(wait.awaited)) {
    const RankWait part{one.awaited, std::max(one.from_ns, from_ns),
                        std::min(one.to_ns, wait.to_ns)};
    const bool goes_on = one.to_ns - error_ns > wait.to_ns;
    if (part.to_ns <= part.from_ns || goes_on || one.awaited == waiting) continue;
    shares[{waiting, wait.awaited}] += part.from_ns - from_ns;
    if (one.awaited == kUnknownRank || links == 8) {
      shares[{waiting, kUnknownRank}] += part.to_ns - part.from_ns;
    } else {
      scan_all(waits, error_ns, waiting, part, links + 1, shares);
    }
    from_ns = part.to_ns;
  }
  shares[{waiting, wait.awaited}] += wait.to_ns - from_ns;
}

// Waits of any length overlap, as those of several lanes do.
TEST(WaitTable, SharesAsIfItLookedAtEveryWait) {
  std::mt19937 random(5);
  const auto below = [&](std::int64_t end) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(end));
  };
  for (int i = 0; i < 20; ++i) {
    Waits waits;
    for (int rank = 0; rank < 4; ++rank) {
      std::set<std::int64_t> begins;
      while (begins.size() < 60) begins.insert(below(10'000));
      for (const std::int64_t from_ns : begins) {
        const std::int64_t most = below(10) == 0 ? 4000 : 200;
        const auto awaited = static_cast<int>((rank + 1 + below(3)) % 4);
        waits[rank].push_back(
            {below(20) == 0 ? kUnknownRank : awaited, from_ns, from_ns + 1 + below(most)});
      }
    }
    constexpr std::int64_t kError = 20;
    WaitShares expected;
    for (const auto& [rank, some] : waits) {
      for (const RankWait& one : some) {
        if (one.awaited != kUnknownRank) scan_all(waits, kError, rank, one, 0, expected);
      }
    }
    EXPECT_EQ(reducer::share_waits(waits, kError), expected);
  }
}

TEST(WaitTable, IsRefusedWithinAMicrobatch) {
  run_mesh({.replicate = 1, .shard = 1}, [](const Mesh& mesh) {
    const StepCase step = waited_step({.replicate = 1, .shard = 1});
    Reducer reducer(mesh);
    register_all(reducer, step);
    const Microbatch microbatch(reducer, {.last = true});
    EXPECT_THAT(caught<UsageError>([&] { static_cast<void>(reducer.wait_table()); }),
                says(HasSubstr("wait_table")));
  });
}

}  // namespace
}  // namespace hsdp::test
